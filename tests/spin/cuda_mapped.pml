/* CUDA kernels on tensors that all ranks see (csrc/kernels/cuda/shares.cuh): an all_reduce in place, again and again.

   | here             | code                                                                                       |
   |------------------|--------------------------------------------------------------------------------------------|
   | tensor           | of each rank; a unit for each block of each rank, which reads and writes it on all ranks     |
   | proctype program | what a rank does between operations: looks at the result, and puts the next input there     |
   | proctype block   | a block of a kernel; block 0 sends the entries of the meeting                              |
   | over             | the signal of each source's block of the same number                                       |
   | ended            | stream order: the program goes on when all blocks of its rank have ended                    |

   Sizes: N ranks, BLOCKS of each, OPERATIONS.

   Broken variants:
     NO_MEETING     a block reads a tensor whose rank has not come: its input is not there
     NO_WAIT        a rank goes on while others still read its tensor, or write results into it
     POST_EARLY     a block says that it is done before it is */

#ifndef N
#define N 2
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef OPERATIONS
#define OPERATIONS 3
#endif

#define UNITS (N * BLOCKS)
#define UNIT(rank, u) ((rank) * UNITS + (u))
#define SIGNAL(dst, src, b) (((dst) * N + (src)) * BLOCKS + (b))
#define INPUT(k) (2 * (k))
#define RESULT(k) (2 * (k) + 1)

byte tensor[N * UNITS];
byte come[N * N];                     /* entries of the meeting: the epoch, by destination and source */
byte over[N * N * BLOCKS];
byte issued[N], ended[N];             /* operations, and blocks that have ended, of all operations */

inline post_done() {
  r = 0;
  do
  :: r < N && r == me -> r++
  :: r < N && r != me -> over[SIGNAL(r, me, b)] = k; r++
  :: r == N -> break
  od;
  r = 0
}

inline wait_done() {
  r = 0;
  do
  :: r < N && r == me -> r++
  :: r < N && r != me -> over[SIGNAL(me, r, b)] >= k; r++
  :: r == N -> break
  od;
  r = 0
}

inline meet() {
  if
  :: b == 0 ->
     do
     :: r < N -> come[r * N + me] = k; r++
     :: r == N -> break
     od;
     r = 0
  :: b != 0
  fi;
#ifndef NO_MEETING
  do
  :: r < N && r == me -> r++
  :: r < N && r != me -> come[me * N + r] >= k; r++
  :: r == N -> break
  od;
  r = 0
#endif
}

inline reduce_unit() {
  do
  :: r < N -> assert(tensor[UNIT(r, me * BLOCKS + b)] == INPUT(k)); r++
  :: r == N -> break
  od;
  r = 0;
  do
  :: r < N -> tensor[UNIT(r, me * BLOCKS + b)] = RESULT(k); r++
  :: r == N -> break
  od;
  r = 0
}

proctype block(byte me; byte b) {
  byte k = 1, r = 0;
  do
  :: k <= OPERATIONS ->
     issued[me] >= k;
     meet();
#ifdef POST_EARLY
     post_done();
     reduce_unit();
#else
     reduce_unit();
     post_done();
#endif
#ifndef NO_WAIT
     wait_done();
#endif
     ended[me] = ended[me] + 1;
     k++
  :: k > OPERATIONS -> break
  od
}

proctype program(byte me) {
  byte k = 1, u = 0;
  do
  :: k <= OPERATIONS + 1 ->
     ended[me] == (k - 1) * BLOCKS;
     do
     :: u < UNITS ->
        assert(k == 1 || tensor[UNIT(me, u)] == RESULT(k - 1));
        tensor[UNIT(me, u)] = INPUT(k);
        u++
     :: u == UNITS -> break
     od;
     u = 0;
     issued[me] = k;
     k++
  :: k > OPERATIONS + 1 -> break
  od
}

init {
  byte i = 0;
  atomic {
    do
    :: i < UNITS -> run block(i / BLOCKS, i % BLOCKS); i++
    :: i == UNITS -> break
    od;
    i = 0;
    do
    :: i < N -> run program(i); i++
    :: i == N -> break
    od
  }
}
