/* all_reduce_two_shot on GPUs: one slot each way (csrc/kernels/cuda/all_reduce_two_shot.cuh).

   | here               | code                                                                              |
   |--------------------|-----------------------------------------------------------------------------------|
   | in_slot, out_slot  | the areas kIn and kOut; slot of a destination and a source                         |
   | in_post, out_post  | their signals                                                                     |
   | proctype rank      | AllReduceTwoShotKernel::run, one block                                            |

   Sizes: N ranks, ITERATIONS.

   Broken variants:
     NO_WAIT_OUT    a rank sends its next inputs although their owner may still be adding up those before
     NO_WAIT_IN     a rank writes its next results although they may still be copied
     POST_IN_EARLY  a rank posts its next inputs before it has copied the results that it has */

#ifndef N
#define N 3
#endif
#ifndef ITERATIONS
#define ITERATIONS 3
#endif

#define HALF_WRITTEN 255
#define AT(dst, src) ((dst) * N + (src))

byte in_slot[N * N], out_slot[N * N]; /* 1 + the iteration whose data it holds */
byte in_post[N * N], out_post[N * N];

#define FOR_PEERS(statement) \
  do \
  :: r < N && r == me -> r++ \
  :: r < N && r != me -> statement; r++ \
  :: r == N -> break \
  od; \
  r = 0

inline send_inputs(j) {
  FOR_PEERS(in_slot[AT(r, me)] = HALF_WRITTEN; in_slot[AT(r, me)] = (j) + 1; in_post[AT(r, me)] = (j) + 1)
}
inline reduce(j) {
#ifndef NO_WAIT_IN
  FOR_PEERS(in_post[AT(me, r)] >= (j) + 1);
#endif
  FOR_PEERS(out_slot[AT(r, me)] = HALF_WRITTEN);
#ifndef NO_WAIT_IN
  FOR_PEERS(assert(in_slot[AT(me, r)] == (j) + 1));
#endif
  FOR_PEERS(out_slot[AT(r, me)] = (j) + 1; out_post[AT(r, me)] = (j) + 1)
}
inline copy_results(j) {
#ifdef NO_WAIT_OUT
  skip
#else
  FOR_PEERS(out_post[AT(me, r)] >= (j) + 1; assert(out_slot[AT(me, r)] == (j) + 1))
#endif
}

proctype rank(byte me) {
  byte j = 0, r = 0;
#ifdef POST_IN_EARLY
  send_inputs(0);
#endif
  do
  :: j < ITERATIONS ->
#ifndef POST_IN_EARLY
     send_inputs(j);
#endif
     reduce(j);
#ifdef POST_IN_EARLY
     if
     :: j + 1 < ITERATIONS -> send_inputs(j + 1)
     :: j + 1 == ITERATIONS
     fi;
#endif
     copy_results(j);
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
