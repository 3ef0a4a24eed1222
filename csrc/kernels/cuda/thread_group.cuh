// Threads that work together. A device function takes its group instead of reading threadIdx, so that the same code runs on a
// block, on one warp, or on some warps of a block while others do something else.
//
// A group has: thread_rank(), num_threads(), sync() (all threads of the group arrive; what they wrote is visible to one another
// afterwards), all(condition) (the same, and true if the condition holds for every thread).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.cuh"

namespace pycoll::cuda {

inline constexpr int kWarpThreads = 32;
inline constexpr uint32_t kWholeWarp = 0xffffffffu;

struct BlockGroup {
  PYCOLL_DEVICE int thread_rank() const { return static_cast<int>(threadIdx.x); }
  PYCOLL_DEVICE int num_threads() const { return static_cast<int>(blockDim.x); }
  PYCOLL_DEVICE void sync() const { __syncthreads(); }
  PYCOLL_DEVICE bool all(bool condition) const { return __syncthreads_and(condition) != 0; }
};

// A warp of a block whose size is a multiple of 32.
struct WarpGroup {
  PYCOLL_DEVICE int thread_rank() const { return static_cast<int>(threadIdx.x) % kWarpThreads; }
  PYCOLL_DEVICE int num_threads() const { return kWarpThreads; }
  PYCOLL_DEVICE void sync() const { __syncwarp(kWholeWarp); }
  PYCOLL_DEVICE bool all(bool condition) const { return __all_sync(kWholeWarp, condition) != 0; }

  PYCOLL_DEVICE int warp() const { return static_cast<int>(threadIdx.x) / kWarpThreads; }
  PYCOLL_DEVICE int num_warps() const { return static_cast<int>(blockDim.x) / kWarpThreads; }
};

// Which of a sequence of items a thread takes: first, first + stride, first + 2 stride, ...
struct Share {
  size_t first;
  size_t stride;
};

template <class Group>
PYCOLL_DEVICE Share share_of_thread(const Group& group) {
  return {static_cast<size_t>(group.thread_rank()), static_cast<size_t>(group.num_threads())};
}

PYCOLL_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
PYCOLL_DEVICE int num_blocks() { return static_cast<int>(gridDim.x); }

// The items of the whole grid, when every thread of its blocks takes part.
PYCOLL_DEVICE Share share_of_grid(const BlockGroup& block) {
  const auto threads = static_cast<size_t>(block.num_threads());
  return {static_cast<size_t>(block_index()) * threads + static_cast<size_t>(block.thread_rank()),
          static_cast<size_t>(num_blocks()) * threads};
}

}  // namespace pycoll::cuda
