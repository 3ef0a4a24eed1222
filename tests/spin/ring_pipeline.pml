/* The ring pipeline: it does not deadlock, and each rank gets the items in the order in which it expects them.

   | here               | code                                                                               |
   |--------------------|------------------------------------------------------------------------------------|
   | tail, head, slot   | the lane from each rank to the next (lane.pml proves lane and wake-ups)            |
   | proctype rank      | ring_pipeline (csrc/collectives/ring_pipeline.h): step s of segment time - s       |
   | STEPS              | num_steps: 2 N - 1 for all_reduce, N for all_gather and reduce_scatter             |
   | SLOTS              | num_slots in Group::lane_to                                                        |
   | chunks one segment | all_reduce's chunks differ by one element, so some may have a segment less: the    |
   | shorter            | first SHORT ranks' chunks lack the last segment                                    |

   Sizes: N ranks, SEGMENTS, STEPS, SLOTS, SHORT.

   At one time a rank sends up to STEPS - 1 segments before it receives one again, so that many slots are enough. Fewer
   deadlock as soon as there are enough segments (SEGMENTS >= STEPS - 1): the rank that is first in each time fills its lane
   while all others do the same. */

#ifndef N
#define N 3
#endif
#ifndef STEPS
#define STEPS (2 * N - 1)
#endif
#ifndef SEGMENTS
#define SEGMENTS (STEPS + 1)
#endif
#ifndef SLOTS
#define SLOTS (STEPS - 1)
#endif
#ifndef SHORT
#define SHORT 0
#endif

#define NEXT ((me + 1) % N)
#define PREVIOUS ((me + N - 1) % N)
/* ring::all_reduce_chunk; what is sent in a step is received by the next rank, as the same chunk, one step later. */
#define CHUNK ((me + 2 * N - 1 - step) % N)
#define SKIPPED (segment == SEGMENTS - 1 && CHUNK >= N - SHORT)
#define ITEM (segment * STEPS + step)
#define HALF_WRITTEN 255

byte tail[N], head[N];                /* of the lane that rank r sends on */
byte slot[N * SLOTS];

proctype rank(byte me) {
  byte time = 0, step = 0, segment = 0, sent = 0, received = 0;
  do
  :: time < SEGMENTS + STEPS - 1 ->
     do
     :: step < STEPS && step <= time ->
        segment = time - step;
        if
        :: segment >= SEGMENTS || SKIPPED
        :: !(segment >= SEGMENTS || SKIPPED) ->
           if
           :: step > 0 ->
              received < tail[PREVIOUS];
              assert(slot[PREVIOUS * SLOTS + received % SLOTS] == ITEM - 1)
           :: step == 0
           fi;
           if
           :: step + 1 < STEPS ->
              sent - head[me] < SLOTS;
              slot[me * SLOTS + sent % SLOTS] = HALF_WRITTEN;
              slot[me * SLOTS + sent % SLOTS] = ITEM;
              sent++;
              tail[me] = sent
           :: step + 1 == STEPS
           fi;
           if
           :: step > 0 ->
              assert(slot[PREVIOUS * SLOTS + received % SLOTS] == ITEM - 1);
              received++;
              head[PREVIOUS] = received
           :: step == 0
           fi
        fi;
        step++
     :: step == STEPS || step > time -> break
     od;
     step = 0;
     segment = 0;
     time++
  :: time == SEGMENTS + STEPS - 1 -> break
  od;
  assert(sent == received)
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
