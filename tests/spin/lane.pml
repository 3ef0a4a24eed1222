/* A lane: a FIFO of slots from one rank to another (docs/memory_model.md, "Lanes").

   | here               | code                                                                               |
   |--------------------|------------------------------------------------------------------------------------|
   | tail, head, slot   | LaneHeader (csrc/lane/shared_lane.h)                                               |
   | proctype sender    | SharedSendLane: writable(), slot(), commit()                                       |
   | proctype receiver  | SharedReceiveLane: readable(), slot(), release()                                   |
   | RING               | the ring of commit() and of release(): the other side only                         |

   Sizes: ITEMS, SLOTS. Rank 0 sends, rank 1 receives.

   Broken variants:
     OVERFILL         the sender fills one slot too many
     COMMIT_EARLY     the tail is posted before the slot has been written
     RELEASE_EARLY    the head is posted before the slot has been read
     SILENT_COMMIT, SILENT_RELEASE   a post does not ring */

#ifndef ITEMS
#define ITEMS 6
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#define N 2
#include "signals.inc"

#define HALF_WRITTEN 255
#ifdef OVERFILL
#define WRITABLE (sent - head <= SLOTS)
#else
#define WRITABLE (sent - head < SLOTS)
#endif

byte tail, head;
byte slot[SLOTS];                     /* 1 + the item that it holds */

proctype sender() {
  byte me = 0, sent = 0;
  do
  :: sent < ITEMS ->
     await(WRITABLE);
#ifdef COMMIT_EARLY
     tail = sent + 1;
#endif
     slot[sent % SLOTS] = HALF_WRITTEN;
     slot[sent % SLOTS] = sent + 1;
     sent++;
#ifndef COMMIT_EARLY
     tail = sent;
#endif
#ifndef SILENT_COMMIT
     RING(1);
#endif
  :: sent == ITEMS -> break
  od
}

proctype receiver() {
  byte me = 1, received = 0;
  do
  :: received < ITEMS ->
     await(received < tail);
     assert(slot[received % SLOTS] == received + 1);
#ifdef RELEASE_EARLY
     head = received + 1;
#endif
     assert(slot[received % SLOTS] == received + 1);
     received++;
#ifndef RELEASE_EARLY
     head = received;
#endif
#ifndef SILENT_RELEASE
     RING(0);
#endif
  :: received == ITEMS -> break
  od
}

init {
  atomic {
    run sender();
    run receiver()
  }
}
