/* gather through the staging of all ranks but the root: rounds of those say "it is there", rounds of the root "it has been
   read". (scatter is broadcast.pml with a part of the slot for each receiver.)

   | here               | code                                                                               |
   |--------------------|------------------------------------------------------------------------------------|
   | slot               | the staging of each sender, by block                                               |
   | round              | GroupPage::round                                                                   |
   | proctype root      | run (csrc/collectives/gather/direct.cpp) where is_root                             |
   | proctype sender    | the same on all other ranks                                                        |
   | end of sender      | the arena, which gives the staging to somebody else once the lease is over         |

   Sizes: N ranks, BLOCKS, SLOTS. Any number of slots is right, one included.

   Broken variants:
     NO_WAIT          a sender does not wait for the root
     SHORT_WAIT       it waits for the block before the one that the slot held
     ACK_EARLY        the root posts before it has read the slots of all
     SILENT_ACK       the root's post does not ring the senders
     SILENT_SEND      a sender's post does not ring the root */

#ifndef N
#define N 3
#endif
#ifndef BLOCKS
#define BLOCKS 6
#endif
#ifndef SLOTS
#define SLOTS 4
#endif
#include "signals.inc"

#define AT(r, j) (r) * SLOTS + (j) % SLOTS
#define HALF_WRITTEN 255
#ifdef SHORT_WAIT
#define NEEDED(j) ((j) - SLOTS)
#else
#define NEEDED(j) ((j) - SLOTS + 1)
#endif

byte slot[N * SLOTS];                 /* 1 + the block that it holds */
byte round[N];                        /* block j is round j + 1 */

proctype root() {
  byte me = 0, j = 0, r = 1, p = 0;
  do
  :: j < BLOCKS ->
#ifdef ACK_EARLY
     round[me] = j + 1;
     ring_everyone();
#endif
     do
     :: r < N ->
        await(round[r] >= j + 1);
        assert(slot[AT(r, j)] == j + 1);
        assert(slot[AT(r, j)] == j + 1);   /* still, when the root has finished reading */
        r++
     :: r == N -> break
     od;
     r = 1;
#ifndef ACK_EARLY
     round[me] = j + 1;
#ifndef SILENT_ACK
     ring_everyone();
#endif
#endif
     j++
  :: j == BLOCKS -> break
  od
}

proctype sender(byte me) {
  byte j = 0, r = 0;
  do
  :: j < BLOCKS ->
#ifndef NO_WAIT
     if
     :: j >= SLOTS -> await(round[0] >= NEEDED(j))
     :: j < SLOTS
     fi;
#endif
     slot[AT(me, j)] = HALF_WRITTEN;
     slot[AT(me, j)] = j + 1;
     round[me] = j + 1;
#ifndef SILENT_SEND
     RING(0);
#endif
     j++
  :: j == BLOCKS -> break
  od;
  do
  :: r < N -> round[r] >= BLOCKS; r++
  :: r == N -> break
  od;
  r = 0;
  do
  :: r < SLOTS -> slot[me * SLOTS + r] = HALF_WRITTEN; r++
  :: r == SLOTS -> break
  od
}

init {
  byte i = 1;
  atomic {
    run root();
    do
    :: i < N -> run sender(i); i++
    :: i == N -> break
    od
  }
}
