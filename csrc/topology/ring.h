// The ring: ranks in a circle, each sends to the next and receives from the previous (Patarasuk and Yuan, 2009).
//
// One chunk a rank. Reduce-scatter: chunk c starts at rank c + 1, goes once around and ends, complete, at rank c. All-gather:
// chunk c starts at rank c and goes around. A rank handles one chunk a step: it sends on what it has just worked on, so in step s
// it receives the chunk that its previous rank handled in step s - 1.
#pragma once

#include "topology/partition.h"

namespace pycoll::ring {

PYCOLL_HOST_DEVICE constexpr int next(int rank, int world_size) {
  return rank + 1 == world_size ? 0 : rank + 1;
}

PYCOLL_HOST_DEVICE constexpr int previous(int rank, int world_size) {
  return rank == 0 ? world_size - 1 : rank - 1;
}

// Steps 0 to n - 1 are a reduce-scatter: the rank starts chunk rank - 1 in step 0 and completes its own in step n - 1. Steps n
// to 2 n - 2 hand the results around.
PYCOLL_HOST_DEVICE constexpr int all_reduce_chunk(int rank, int step, int world_size) {
  return (rank + 2 * world_size - 1 - step) % world_size;
}

// Step 0 starts the rank's own chunk; steps 1 to n - 1 bring the others.
PYCOLL_HOST_DEVICE constexpr int all_gather_chunk(int rank, int step, int world_size) {
  return (rank + world_size - step) % world_size;
}

}  // namespace pycoll::ring
