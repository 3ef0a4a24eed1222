// The number of an operation, kept by each block for itself.
//
// Blocks of a grid that shared one counter would have to agree on when the last of them has read it. So there are kMaxBlocks equal
// words: block b reads word b when it starts, and when it ends sets the words b, b + num_blocks, b + 2 num_blocks, ..., of which
// no other block of its grid reads one. All words are equal between kernels, whatever the sizes of the grids.
#pragma once

#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/peer_access.cuh"
#include "kernels/cuda/thread_group.cuh"

namespace pycoll::cuda {

PYCOLL_DEVICE uint32_t next_epoch(const uint32_t* epochs) {
  return peer::load_relaxed(epochs + block_index()) + 1;
}

// When every thread of the block has read the epoch.
PYCOLL_DEVICE void end_epoch(const BlockGroup& block, uint32_t* epochs, uint32_t epoch) {
  for (int i = block_index() + block.thread_rank() * num_blocks(); i < kMaxBlocks;
       i += block.num_threads() * num_blocks())
    peer::store_relaxed(epochs + i, epoch);
}

}  // namespace pycoll::cuda
