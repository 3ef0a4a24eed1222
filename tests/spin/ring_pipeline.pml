/* The ring pipeline: it does not deadlock, and each rank gets the items in the order in which it expects them.

   | here               | code                                                                               |
   |--------------------|------------------------------------------------------------------------------------|
   | tail, head, slot   | the lane from each rank to the next (lane.pml proves lane and wake-ups)            |
   | proctype rank      | ring_pipeline (csrc/collectives/ring_pipeline.h): step s of segment time - s       |
   | STEPS              | num_steps: 2 N - 1 for all_reduce, N for all_gather and reduce_scatter             |
   | SLOTS              | num_slots in Group::lane_to                                                        |
   | SKIPPED            | all_reduce's chunks differ by one element: the last SHORT ones may have a segment  |
   |                    | less                                                                               |

   Sizes: N ranks, SEGMENTS, STEPS, SLOTS, SHORT. COUNT_ONLY leaves out what the slots hold, for more ranks.

   STEPS + 1 slots are needed, and enough: when a rank begins a time, its lane may still hold the STEPS - 1 segments of the
   time before; it adds that of step 0, and then, in step 1, needs one more slot while it holds the segment that it works
   on, which it releases only after it has sent it on. All ranks may be there at once, so with fewer slots they deadlock as
   soon as there are STEPS or more segments (broken variant: SLOTS=STEPS). */

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
#define SLOTS (2 * N)
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

#ifdef COUNT_ONLY
#define WRITE(value) skip
#define EXPECT(value) skip
#else
byte slot[N * SLOTS];
#define WRITE(value) slot[me * SLOTS + sent % SLOTS] = value
#define EXPECT(value) assert(slot[PREVIOUS * SLOTS + received % SLOTS] == value)
#endif
byte tail[N], head[N];                /* of the lane that rank r sends on */

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
              EXPECT(ITEM - 1)
           :: step == 0
           fi;
           if
           :: step + 1 < STEPS ->
              sent - head[me] < SLOTS;
              WRITE(HALF_WRITTEN);
              WRITE(ITEM);
              sent++;
              tail[me] = sent
           :: step + 1 == STEPS
           fi;
           if
           :: step > 0 ->
              EXPECT(ITEM - 1);
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
  assert(received == tail[PREVIOUS])  /* nothing is left over */
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
