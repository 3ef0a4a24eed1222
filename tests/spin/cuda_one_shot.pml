/* all_reduce_one_shot on GPUs: packets that carry their own flags (csrc/kernels/cuda/ll.cuh, all_reduce_one_shot.cuh).

   | here             | code                                                                                |
   |------------------|-------------------------------------------------------------------------------------|
   | header, data     | the flags of a stripe's header and of one of its packets; a store is one atom         |
   | proctype rank    | AllReduceOneShotKernel::run, OPERATIONS times; every other operation has no data     |

   Sizes: N ranks, OPERATIONS, PARITIES. A packet that is written over before it is read is waited for in vain.

   Broken variants:
     PARITIES=1      a rank that is done sends its next packets over those that a slow one has still to read
     NO_HEADER_WAIT  nothing keeps a rank from going on through operations without data */

#ifndef N
#define N 3
#endif
#ifndef OPERATIONS
#define OPERATIONS 4
#endif
#ifndef PARITIES
#define PARITIES 2
#endif

#define STRIPE(dst, src, k) (((dst) * N + (src)) * PARITIES + (k) % PARITIES)
#define HAS_DATA(k) ((k) % 3 != 2)

byte header[N * N * PARITIES];
byte data[N * N * PARITIES];

inline send() {
  do
  :: r < N && r == me -> r++
  :: r < N && r != me ->
     header[STRIPE(r, me, k)] = k;
     if
     :: HAS_DATA(k) -> data[STRIPE(r, me, k)] = k
     :: !HAS_DATA(k)
     fi;
     r++
  :: r == N -> break
  od;
  r = 0
}

inline receive() {
  do
  :: r < N && r == me -> r++
  :: r < N && r != me ->
#ifndef NO_HEADER_WAIT
     header[STRIPE(me, r, k)] == k;
#endif
     r++
  :: r == N -> break
  od;
  r = 0;
  do
  :: r < N && (r == me || !HAS_DATA(k)) -> r++
  :: r < N && r != me && HAS_DATA(k) -> data[STRIPE(me, r, k)] == k; r++
  :: r == N -> break
  od;
  r = 0
}

proctype rank(byte me) {
  byte k = 1, r = 0;
  do
  :: k <= OPERATIONS -> send(); receive(); k++
  :: k > OPERATIONS -> break
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
