// Block-wise quantisation (bucket.h has the rule and its error). A warp takes a block: it finds the largest magnitude, then makes
// codes; the data is read twice, the second time from the cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/block_scale.cuh"
#include "kernels/cuda/bucket.h"
#include "kernels/cuda/float_io.cuh"
#include "kernels/cuda/thread_group.cuh"

namespace pycoll::cuda {

// Runs of 16 elements: one vector of codes. Blocks are multiples of 32 elements, so a run lies within one.
inline constexpr int kQuantisedRun = 16;

// What both kernels share: who takes which block, and which part of it goes in vectors.
template <class Fn>
PYCOLL_DEVICE void for_each_block(const QuantiseArgs& args, Fn fn) {
  const WarpGroup warp;
  const auto num_warps = static_cast<size_t>(warp.num_warps());
  const auto first =
      static_cast<size_t>(block_index()) * num_warps + static_cast<size_t>(warp.warp());
  const bool is_aligned = is_vector_aligned(args.data) && is_vector_aligned(args.codes);
  for (size_t block = first; block * args.block_numel < args.numel;
       block += static_cast<size_t>(num_blocks()) * num_warps) {
    const size_t begin = block * args.block_numel;
    const size_t rest = args.numel - begin;
    const size_t numel = rest < args.block_numel ? rest : args.block_numel;
    const size_t num_in_runs = is_aligned ? numel / kQuantisedRun * kQuantisedRun : 0;
    fn(block, Range{begin, numel}, num_in_runs);
  }
}

template <class Data, class Code>
struct QuantiseKernel {
  using Args = QuantiseArgs;
  static constexpr int kMaxThreads = 256;

  static PYCOLL_DEVICE void run(const Args& args) {
    for_each_block(args, [&](size_t block, Range range, size_t num_in_runs) {
      const WarpGroup warp;
      const uint32_t amax = max_of_warp(largest(args, range, num_in_runs));
      const float scale = block_scale<Code>(amax);
      if (warp.thread_rank() == 0) store_scale(args.scales + block, scale);
      encode(args, range, num_in_runs, reciprocal(scale));
    });
  }

 private:
  static constexpr size_t kItem = sizeof(typename Data::Storage);

  static PYCOLL_DEVICE const std::byte* data_at(const Args& args, size_t i) {
    return static_cast<const std::byte*>(args.data) + i * kItem;
  }
  static PYCOLL_DEVICE std::byte* code_at(const Args& args, size_t i) {
    return static_cast<std::byte*>(args.codes) + i;
  }

  // Of this lane's elements.
  static PYCOLL_DEVICE uint32_t largest(const Args& args, Range range, size_t num_in_runs) {
    const auto lane = static_cast<size_t>(WarpGroup{}.thread_rank());
    uint32_t amax = 0;
    const auto note = [&](float x) {
      const uint32_t bits = magnitude_bits(x);
      if (bits > amax) amax = bits;
    };
    for (size_t i = lane * kQuantisedRun; i < num_in_runs; i += kWarpThreads * kQuantisedRun) {
      float x[kQuantisedRun];
      Run<Data, kQuantisedRun>::load_vectors(data_at(args, range.begin + i), x);
#pragma unroll
      for (int k = 0; k < kQuantisedRun; ++k) note(x[k]);
    }
    for (size_t i = num_in_runs + lane; i < range.numel; i += kWarpThreads)
      note(load_scalar<Data>(data_at(args, range.begin + i)));
    return amax;
  }

  static PYCOLL_DEVICE void encode(const Args& args, Range range, size_t num_in_runs,
                                   float inverse) {
    const auto lane = static_cast<size_t>(WarpGroup{}.thread_rank());
    for (size_t i = lane * kQuantisedRun; i < num_in_runs; i += kWarpThreads * kQuantisedRun) {
      float x[kQuantisedRun];
      Run<Data, kQuantisedRun>::load_vectors(data_at(args, range.begin + i), x);
#pragma unroll
      for (int k = 0; k < kQuantisedRun; ++k) x[k] = rounded_product(x[k], inverse);
      Run<Code, kQuantisedRun>::store_vectors(code_at(args, range.begin + i), x);
    }
    for (size_t i = num_in_runs + lane; i < range.numel; i += kWarpThreads) {
      const float x = load_scalar<Data>(data_at(args, range.begin + i));
      store_scalar<Code>(code_at(args, range.begin + i), rounded_product(x, inverse));
    }
  }
};

template <class Data, class Code>
struct DequantiseKernel {
  using Args = QuantiseArgs;
  static constexpr int kMaxThreads = 256;

  static PYCOLL_DEVICE void run(const Args& args) {
    for_each_block(args, [&](size_t block, Range range, size_t num_in_runs) {
      const float scale = load_scale(args.scales + block);
      decode(args, range, num_in_runs, scale);
    });
  }

 private:
  static PYCOLL_DEVICE void decode(const Args& args, Range range, size_t num_in_runs, float scale) {
    const auto lane = static_cast<size_t>(WarpGroup{}.thread_rank());
    const auto* const codes = static_cast<const std::byte*>(args.codes) + range.begin;
    auto* const data =
        static_cast<std::byte*>(args.data) + range.begin * sizeof(typename Data::Storage);
    for (size_t i = lane * kQuantisedRun; i < num_in_runs; i += kWarpThreads * kQuantisedRun) {
      float x[kQuantisedRun];
      Run<Code, kQuantisedRun>::load_vectors(codes + i, x);
#pragma unroll
      for (int k = 0; k < kQuantisedRun; ++k) x[k] = rounded_product(x[k], scale);
      Run<Data, kQuantisedRun>::store_vectors(data + i * sizeof(typename Data::Storage), x);
    }
    for (size_t i = num_in_runs + lane; i < range.numel; i += kWarpThreads)
      store_scalar<Data>(data + i * sizeof(typename Data::Storage),
                         rounded_product(load_scalar<Code>(codes + i), scale));
  }
};

}  // namespace pycoll::cuda
