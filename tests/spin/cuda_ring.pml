/* The rings on GPUs: tails and heads (csrc/kernels/cuda/ring_simple.cuh; LL128 has the same heads, and flags for tails).

   | here             | code                                                                                |
   |------------------|-------------------------------------------------------------------------------------|
   | tail, head       | RingSignals; of the lane that rank r sends on                                       |
   | proctype rank    | go_around (all_reduce_ring.cuh), SEGMENTS times: STEPS steps each                   |
   | the wait         | begin_step: first for a full slot, then for a free one                               |
   | FREE_AHEAD       | wait_free waits for head >= sent - SLOTS + FREE_AHEAD                                |

   Sizes: N ranks, SEGMENTS, SLOTS, STEPS (2 N - 1 for all_reduce, N for the others).

   With no more ranks than slots, heads are not needed: what a rank receives has gone around and shows that its next rank has read
   all that heads would tell of. So the code is checked with one rank more than it has slots.

   Broken variants (the last three with more ranks than slots):
     SLOTS=1        all ranks hold a full slot and wait for a free one
     FREE_AHEAD=0   a slot is written one step before it is free
     TAIL_EARLY     the tail is raised before the data is written
     HEAD_EARLY     the head is raised before the data is read */

#ifndef N
#define N 3
#endif
#ifndef STEPS
#define STEPS (2 * N - 1)
#endif
#ifndef SEGMENTS
#define SEGMENTS 3
#endif
#ifndef SLOTS
#define SLOTS 4
#endif
#ifndef FREE_AHEAD
#define FREE_AHEAD 1
#endif

#define PREVIOUS ((me + N - 1) % N)
#define ITEM (segment * STEPS + step)
#define HALF_WRITTEN 255

byte slot[N * SLOTS];
byte tail[N], head[N];

proctype rank(byte me) {
  byte segment = 0, step = 0, sent = 0, received = 0;
  do
  :: segment < SEGMENTS ->
     do
     :: step < STEPS ->
        if
        :: step > 0 -> received < tail[PREVIOUS]
        :: step == 0
        fi;
        if
        :: step + 1 < STEPS && sent >= SLOTS -> head[me] >= sent - SLOTS + FREE_AHEAD
        :: step + 1 == STEPS || sent < SLOTS
        fi;
#ifdef HEAD_EARLY
        if
        :: step > 0 -> head[PREVIOUS] = received + 1
        :: step == 0
        fi;
#endif
        if
        :: step + 1 < STEPS ->
#ifdef TAIL_EARLY
           tail[me] = sent + 1;
#endif
           slot[me * SLOTS + sent % SLOTS] = HALF_WRITTEN
        :: step + 1 == STEPS
        fi;
        if
        :: step > 0 ->
           assert(slot[PREVIOUS * SLOTS + received % SLOTS] == ITEM - 1)
        :: step == 0
        fi;
        if
        :: step + 1 < STEPS ->
           slot[me * SLOTS + sent % SLOTS] = ITEM;
           sent++;
           tail[me] = sent
        :: step + 1 == STEPS
        fi;
        if
        :: step > 0 -> received++; head[PREVIOUS] = received
        :: step == 0
        fi;
        step++
     :: step == STEPS -> break
     od;
     step = 0;
     segment++
  :: segment == SEGMENTS -> break
  od;
  assert(received == tail[PREVIOUS])
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
