/* One exchange a block, through four staging slots in turn (docs/memory_model.md, "Rounds and staging").

   | here               | code                                                                               |
   |--------------------|------------------------------------------------------------------------------------|
   | slot               | the staging of each rank (Group::lease_staging), by block                          |
   | round              | GroupPage::round                                                                   |
   | proctype rank      | StagedExchange::run (csrc/collectives/staged_exchange.h): BLOCKS blocks            |
   | ring_if_last       | Group::post_round(Wake::kIfLast)                                                   |
   | end of proctype    | the arena, which gives the staging to somebody else once the lease is over         |
   |                    | (Group::end_staging, Arena::release_when)                                          |

   Sizes: N ranks, BLOCKS, SLOTS, COUNTERS (arrival counters used in turn).

   Broken variants:
     SLOTS=3         block j - 2 may still be read by a rank whose block j - 1 has been seen
     COUNTERS=2      a rank may be two rounds ahead of one that has posted and not yet counted itself in
     NO_FINAL_POST   the lease ends with the round of the last block, which is posted before the last reads */

#ifndef N
#define N 3
#endif
#ifndef BLOCKS
#define BLOCKS 5
#endif
#ifndef SLOTS
#define SLOTS 4
#endif
#ifndef COUNTERS
#define COUNTERS 4
#endif
#include "signals.inc"

#define AT(r, j) (r) * SLOTS + (j) % SLOTS
#define HALF_WRITTEN 255
#ifdef NO_FINAL_POST
#define LAST_ROUND BLOCKS
#else
#define LAST_ROUND (BLOCKS + 1)
#endif

byte slot[N * SLOTS];                 /* 1 + the block that it holds */
byte round[N];                        /* block j is posted as round j + 1 */

/* StagedExchange::show */
inline show_block(j) {
  slot[AT(me, j)] = HALF_WRITTEN;
  slot[AT(me, j)] = j + 1;
  round[me] = j + 1;
  ring_if_last((j + 1) % COUNTERS)
}

proctype rank(byte me) {
  byte j = 0, r = 0, p = 0;
  byte counted[COUNTERS];
  show_block(0);
  do
  :: j < BLOCKS ->
     if
     :: j + 1 < BLOCKS -> show_block(j + 1)
     :: j + 1 == BLOCKS
     fi;
     do
     :: r < N && r == me -> r++
     :: r < N && r != me -> await(round[r] >= j + 1); r++
     :: r == N -> break
     od;
     r = 0;
     do
     :: r < N && r == me -> r++
     :: r < N && r != me ->
        assert(slot[AT(r, j)] == j + 1);
        assert(slot[AT(r, j)] == j + 1);   /* still, when the rank has finished reading */
        r++
     :: r == N -> break
     od;
     r = 0;
     j++
  :: j == BLOCKS -> break
  od;
#ifndef NO_FINAL_POST
  round[me] = BLOCKS + 1;                  /* Wake::kNobody */
#endif
  do
  :: r < N -> round[r] >= LAST_ROUND; r++
  :: r == N -> break
  od;
  r = 0;
  do
  :: r < SLOTS -> slot[me * SLOTS + r] = HALF_WRITTEN; r++
  :: r == SLOTS -> break
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
