/* broadcast through the root's staging: rounds of the root say "it is there", rounds of the others "it has been read".

   | here               | code                                                                               |
   |--------------------|------------------------------------------------------------------------------------|
   | slot               | the root's staging, by block                                                       |
   | round              | GroupPage::round                                                                   |
   | proctype root      | run (csrc/collectives/broadcast/direct.cpp) where is_root                          |
   | proctype receiver  | the same on all other ranks                                                        |
   | ring_everyone      | Group::post_round(Wake::kEveryone)                                                 |
   | RING(0)            | Group::post_round(Wake::kRoot): rank 0 is the root here                            |

   Sizes: N ranks, BLOCKS, SLOTS. Any number of slots is right, one included: the root waits for the acknowledgements
   of the block that the slot held.

   Broken variants:
     NO_WAIT          the root does not wait for acknowledgements
     SHORT_WAIT       it waits for those of one block before
     ONE_READER       it waits for rank 1 only
     ACK_EARLY        a receiver posts before it has finished reading
     SILENT_ACK       a receiver's post does not ring the root
     RING_ONE         the root's post rings rank 1 only */

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

#define HALF_WRITTEN 255
#ifdef SHORT_WAIT
#define NEEDED(j) ((j) - SLOTS)
#else
#define NEEDED(j) ((j) - SLOTS + 1)
#endif

byte slot[SLOTS];                     /* 1 + the block that it holds */
byte round[N];                        /* block j is round j + 1 */

proctype root() {
  byte me = 0, j = 0, r = 1, p = 0;
  do
  :: j < BLOCKS ->
#ifndef NO_WAIT
     do
     :: j >= SLOTS && r < N ->
        await(round[r] >= NEEDED(j));
#ifdef ONE_READER
        r = N;
#else
        r++
#endif
     :: j < SLOTS || r == N -> break
     od;
     r = 1;
#endif
     slot[j % SLOTS] = HALF_WRITTEN;
     slot[j % SLOTS] = j + 1;
     round[me] = j + 1;
#ifdef RING_ONE
     RING(1);
#else
     ring_everyone();
#endif
     j++
  :: j == BLOCKS -> break
  od
}

proctype receiver(byte me) {
  byte j = 0;
  do
  :: j < BLOCKS ->
     await(round[0] >= j + 1);
     assert(slot[j % SLOTS] == j + 1);
#ifdef ACK_EARLY
     round[me] = j + 1;
     assert(slot[j % SLOTS] == j + 1);
#else
     assert(slot[j % SLOTS] == j + 1);
     round[me] = j + 1;
#endif
#ifndef SILENT_ACK
     RING(0);
#endif
     j++
  :: j == BLOCKS -> break
  od
}

init {
  byte i = 1;
  atomic {
    run root();
    do
    :: i < N -> run receiver(i); i++
    :: i == N -> break
    od
  }
}
