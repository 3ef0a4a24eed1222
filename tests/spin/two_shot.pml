/* all_reduce in two shots: in-slots and out-slots in turn (docs/memory_model.md, "Rounds and staging").

   | here               | code                                                                               |
   |--------------------|------------------------------------------------------------------------------------|
   | in_slot, out_slot  | the two halves of the staging of each rank, by block                               |
   | round              | GroupPage::round; IN(j), OUT(j): TwoShot::in_round, out_round                      |
   | proctype rank      | run (csrc/collectives/all_reduce/two_shot.cpp): BLOCKS blocks                      |
   | post(quiet)        | Group::post_round(Wake::kNobody)                                                   |
   | post(loud)         | Group::post_round(Wake::kIfLast)                                                   |
   | end of proctype    | the arena, which gives the staging to somebody else once the lease is over         |

   Sizes: N ranks, BLOCKS, IN_SLOTS, OUT_SLOTS, COUNTERS (arrival counters used in turn).

   Two out-slots are enough: before a rank reduces block j it has seen out(j - 1) of all, which they post after they have
   copied the results of block j - 2. With three counters rings get lost (a rank may be three rounds ahead of one that has
   posted and not yet counted itself in), but the late rank posts again before it waits, and that ring makes up for it. The
   code has three out-slots and four counters: neither relies on such luck.

   Broken variants:
     IN_SLOTS=2      block j - 1 may still be reduced by a rank that has not posted out(j - 1)
     OUT_SLOTS=1     the results of block j - 1 may still be copied
     COUNTERS=2      rings get lost, and nothing makes up for them (from three ranks on)
     NO_FINAL_POST   the lease ends with the round that iteration BLOCKS posts before the last reads
     POST_OUT_EARLY  a rank posts out(j) before it has finished reducing block j */

#ifndef N
#define N 3
#endif
#ifndef BLOCKS
#define BLOCKS 4
#endif
#ifndef IN_SLOTS
#define IN_SLOTS 3
#endif
#ifndef OUT_SLOTS
#define OUT_SLOTS 3
#endif
#ifndef COUNTERS
#define COUNTERS 4
#endif
#include "signals.inc"

#define HALF_WRITTEN 255
#define IN(j) ((j) == 0 -> 1 : 2 * (j))
#define OUT(j) (2 * (j) + 3)
#ifdef NO_FINAL_POST
#define LAST_ROUND (2 * BLOCKS + 2)
#else
#define LAST_ROUND (2 * BLOCKS + 3)
#endif

byte in_slot[N * IN_SLOTS];           /* 1 + the block that it holds */
byte out_slot[N * OUT_SLOTS];
byte round[N];

#define loud true
#define quiet false
inline post(rings) {
  posted++;
  round[me] = posted;
  if
  :: rings -> ring_if_last(posted % COUNTERS)
  :: !rings
  fi
}

inline show_input(j) {
  in_slot[me * IN_SLOTS + (j) % IN_SLOTS] = HALF_WRITTEN;
  in_slot[me * IN_SLOTS + (j) % IN_SLOTS] = (j) + 1
}

inline copy_results(j) {
  do
  :: r < N && r == me -> r++
  :: r < N && r != me ->
     await(round[r] >= OUT(j));
     assert(out_slot[r * OUT_SLOTS + (j) % OUT_SLOTS] == (j) + 1);
     assert(out_slot[r * OUT_SLOTS + (j) % OUT_SLOTS] == (j) + 1);
     r++
  :: r == N -> break
  od;
  r = 0
}

inline await_inputs(j) {
  do
  :: r < N && r == me -> r++
  :: r < N && r != me -> await(round[r] >= IN(j)); r++
  :: r == N -> break
  od;
  r = 0
}

inline reduce_own_part(j) {
  out_slot[me * OUT_SLOTS + (j) % OUT_SLOTS] = HALF_WRITTEN;
#ifdef POST_OUT_EARLY
  post(loud);
#endif
  do
  :: r < N && r == me -> r++
  :: r < N && r != me ->
     assert(in_slot[r * IN_SLOTS + (j) % IN_SLOTS] == (j) + 1);
     assert(in_slot[r * IN_SLOTS + (j) % IN_SLOTS] == (j) + 1);
     r++
  :: r == N -> break
  od;
  r = 0;
  out_slot[me * OUT_SLOTS + (j) % OUT_SLOTS] = (j) + 1
}

proctype rank(byte me) {
  byte j = 0, r = 0, p = 0, posted = 0;
  byte counted[COUNTERS];
  show_input(0);
  post(loud);
  do
  :: j <= BLOCKS ->
     if
     :: j + 1 < BLOCKS -> show_input(j + 1); post(loud)
     :: j + 1 >= BLOCKS -> post(quiet)
     fi;
     if
     :: j > 0 -> copy_results(j - 1)
     :: j == 0
     fi;
     if
     :: j < BLOCKS ->
        await_inputs(j);
        reduce_own_part(j);
#ifndef POST_OUT_EARLY
        post(loud);
#endif
     :: j == BLOCKS
     fi;
     j++
  :: j > BLOCKS -> break
  od;
#ifndef NO_FINAL_POST
  post(quiet);
#endif
  do
  :: r < N -> round[r] >= LAST_ROUND; r++
  :: r == N -> break
  od;
  r = 0;
  do
  :: r < OUT_SLOTS -> out_slot[me * OUT_SLOTS + r] = HALF_WRITTEN; r++
  :: r == OUT_SLOTS -> break
  od
}

init {
  byte i = 0;
  atomic {
    do
    :: i < N -> run rank(i); i++
    :: i == N -> break
    od
  }
}
