/* The direct CUDA kernels: slots in turn, without acknowledgement (csrc/kernels/cuda/reduce_scatter_direct.cuh).

   | here             | code                                                                                |
   |------------------|-------------------------------------------------------------------------------------|
   | slot, posted     | a block's slot and signal of each source; one area, or kDirectAreas in turn           |
   | proctype rank    | a block of each rank: send, post, wait for all, read                                 |

   Sizes: N ranks, ITERATIONS, SLOTS (kDirectAreas). One model process a rank: within a block, barriers separate the steps.

   Broken variants:
     SLOTS=1       a rank writes segment j + 1 over one that a slow rank has still to read
     POST_EARLY    a rank posts before it has read what came in the iteration before */

#ifndef N
#define N 3
#endif
#ifndef ITERATIONS
#define ITERATIONS 4
#endif
#ifndef SLOTS
#define SLOTS 2
#endif

#define HALF_WRITTEN 255
#define SLOT(dst, src, j) (((dst) * N + (src)) * SLOTS + (j) % SLOTS)

byte slot[N * N * SLOTS];             /* 1 + the iteration whose data it holds */
byte posted[N * N * SLOTS];

inline send(j) {
  do
  :: r < N && r == me -> r++
  :: r < N && r != me ->
     slot[SLOT(r, me, j)] = HALF_WRITTEN;
     slot[SLOT(r, me, j)] = (j) + 1;
     posted[SLOT(r, me, j)] = (j) + 1;
     r++
  :: r == N -> break
  od;
  r = 0
}

inline await(j) {
  do
  :: r < N && r == me -> r++
  :: r < N && r != me -> posted[SLOT(me, r, j)] >= (j) + 1; r++
  :: r == N -> break
  od;
  r = 0
}

inline read(j) {
  do
  :: r < N && r == me -> r++
  :: r < N && r != me -> assert(slot[SLOT(me, r, j)] == (j) + 1); r++
  :: r == N -> break
  od;
  r = 0
}

proctype rank(byte me) {
  byte j = 0, r = 0;
#ifdef POST_EARLY
  send(0);
#endif
  do
  :: j < ITERATIONS ->
#ifdef POST_EARLY
     if
     :: j + 1 < ITERATIONS -> send(j + 1)
     :: j + 1 == ITERATIONS
     fi;
#else
     send(j);
#endif
     await(j);
     read(j);
     j++
  :: j == ITERATIONS -> break
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
