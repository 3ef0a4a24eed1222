/* The handshake: two slots by parity need no acknowledgement (docs/memory_model.md, "The handshake").

   | here               | code                                                                                |
   |--------------------|-------------------------------------------------------------------------------------|
   | slot               | fingerprint and payload in GroupPage::slot(sequence), by the sequence's parity      |
   | signals            | HandshakeLine::signal                                                               |
   | proctype rank      | run_collective (csrc/engine/collective_queue.cpp), one pass an operation            |
   | ring_if_last       | Group::post_handshake: only the last to arrive rings                                |
   | refused            | CollectiveOperation::refusal: this rank's arguments are wrong, in any operation     |
   | last reads         | compare_fingerprints and the algorithm, which reads the payloads                    |

   Sizes: N ranks, OPERATIONS, SLOTS, COUNTERS (arrival counters used in turn).

   Broken variants:
     SLOTS=1               a rank that is one operation ahead overwrites what others still read
     COUNTERS=1            a rank may be seen to have posted k before it has counted itself in; others, on with k + 1, then
                           count first, nobody is the last of k, and whoever sleeps is not woken (from three ranks on)
     REFUSAL_GOES_ON       a rank that refused its arguments does not wait for the others
     COMPARE_EARLY         a rank reads the slots of its peers before all signals have come */

#ifndef N
#define N 3
#endif
#ifndef OPERATIONS
#define OPERATIONS 3
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef COUNTERS
#define COUNTERS 2
#endif
#include "signals.inc"

#define AT(r, k) (r) * SLOTS + (k) % SLOTS
#define HALF_WRITTEN 255

byte slot[N * SLOTS];                 /* the operation whose fingerprint and payload it holds */
byte signals[N * SLOTS];

proctype rank(byte me) {
  byte k = 1, r = 0, p = 0;
  byte counted[COUNTERS];
  bool refused = false;
  do
  :: k <= OPERATIONS ->
     if
     :: refused = false
     :: refused = true
     fi;
     slot[AT(me, k)] = HALF_WRITTEN;
     slot[AT(me, k)] = k;
     signals[AT(me, k)] = k;
     ring_if_last(k % COUNTERS);
     do
     :: r < N && r == me -> r++
     :: r < N && r != me ->
#ifdef REFUSAL_GOES_ON
        if
        :: !refused -> await(signals[AT(r, k)] >= k)
        :: refused
        fi;
#elif defined(COMPARE_EARLY)
        skip;
#else
        await(signals[AT(r, k)] >= k);
#endif
        r++
     :: r == N -> break
     od;
     r = 0;
     do
     :: r < N && !refused && r != me ->
        assert(slot[AT(r, k)] == k);
        assert(slot[AT(r, k)] == k);  /* still, when the rank has finished reading */
        r++
     :: r < N && (refused || r == me) -> r++
     :: r == N -> break
     od;
     r = 0;
     k++
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
