/* How every CUDA kernel but one-shot begins (csrc/kernels/cuda/meeting.cuh): entries are compared, and staging memory is free.

   | here             | code                                                                                       |
   |------------------|--------------------------------------------------------------------------------------------|
   | entry, epoch     | MeetingEntry of each parity and source, in the memory of the destination                    |
   | proctype block   | a block of a kernel; block 0 sends                                                         |
   | ended            | stream order: a kernel begins when all blocks of the one before have ended                  |
   | slot, tail       | staging memory of some operation: its root writes a slot of every rank and waits for nobody |

   Sizes: N ranks, BLOCKS of each, OPERATIONS, PARITIES.

   Broken variants:
     PARITIES=1     a rank that is done writes its next entry over one that a slow block has still to read
     NO_MEETING     the root of the next operation writes over what has still to be read */

#ifndef N
#define N 2
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef OPERATIONS
#define OPERATIONS 4
#endif
#ifndef PARITIES
#define PARITIES 2
#endif

#define HALF_WRITTEN 255
#define ENTRY(dst, src, k) (((dst) * N + (src)) * PARITIES + (k) % PARITIES)

byte entry[N * N * PARITIES];
byte epoch[N * N * PARITIES];
byte slot[N * BLOCKS], tail[N * BLOCKS];
byte ended[N];                        /* blocks that have ended, of all operations */

inline send_entries() {
  r = 0;
  do
  :: r < N && r == me -> r++
  :: r < N && r != me ->
     entry[ENTRY(r, me, k)] = HALF_WRITTEN;
     entry[ENTRY(r, me, k)] = k;
     epoch[ENTRY(r, me, k)] = k;
     r++
  :: r == N -> break
  od;
  r = 0
}

inline meet_all() {
  r = 0;
  do
  :: r < N && r == me -> r++
  :: r < N && r != me ->
     epoch[ENTRY(me, r, k)] >= k;
     assert(entry[ENTRY(me, r, k)] == k);
     r++
  :: r == N -> break
  od;
  r = 0
}

inline broadcast_of_root() {
  if
  :: me == 0 ->
     r = 0;
     do
     :: r < N && r == me -> r++
     :: r < N && r != me ->
        slot[r * BLOCKS + b] = HALF_WRITTEN;
        slot[r * BLOCKS + b] = k;
        tail[r * BLOCKS + b] = k;
        r++
     :: r == N -> break
     od;
     r = 0
  :: me != 0 ->
     tail[me * BLOCKS + b] >= k;
     assert(slot[me * BLOCKS + b] == k)
  fi
}

proctype block(byte me; byte b) {
  byte k = 1, r = 0;
  do
  :: k <= OPERATIONS ->
     ended[me] >= (k - 1) * BLOCKS;
     if
     :: b == 0 -> send_entries()
     :: b != 0
     fi;
#ifndef NO_MEETING
     meet_all();
#endif
     broadcast_of_root();
     ended[me] = ended[me] + 1;
     k++
  :: k > OPERATIONS -> break
  od
}

init {
  byte i = 0;
  atomic {
    do
    :: i < N * BLOCKS -> run block(i / BLOCKS, i % BLOCKS); i++
    :: i == N * BLOCKS -> break
    od
  }
}
