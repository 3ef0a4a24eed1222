// Block-wise quantisation (docs/quantisation.md has the rule). A warp takes a block: it finds the largest magnitude, then makes
// codes; the data is read twice, the second time from the cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/block_scale.cuh"
#include "kernels/cuda/bucket.h"
#include "kernels/cuda/float_io.cuh"
#include "kernels/cuda/thread_group.cuh"

namespace pycoll::cuda {

// Runs of 16 elements: one vector of codes.
inline constexpr int kQuantisedRun = 16;

// A block, and how this lane goes through it.
template <class Data>
struct QuantisedBlock {
  static constexpr size_t kItem = sizeof(typename Data::Storage);
  std::byte* data;
  std::byte* codes;
  size_t numel;
  RunSplit split;

  // `on_run(i)` and `on_element(i)` for the lane's share.
  template <class OnRun, class OnElement>
  PYCOLL_DEVICE void for_each(OnRun on_run, OnElement on_element) const {
    const auto lane = static_cast<size_t>(WarpGroup{}.thread_rank());
    for (size_t i = split.begin() + lane * kQuantisedRun; i < split.end();
         i += kWarpThreads * kQuantisedRun)
      on_run(i);
    for (size_t i = lane; i < split.num_single(numel); i += kWarpThreads)
      on_element(split.single(i));
  }
};

// Calls `fn(index, block)` for the blocks of this warp.
template <class Data, class Code, class Fn>
PYCOLL_DEVICE void for_each_block(const QuantiseArgs& args, Fn fn) {
  constexpr size_t kItem = sizeof(typename Data::Storage);
  const WarpGroup warp;
  const auto num_warps = static_cast<size_t>(warp.num_warps());
  const auto first =
      static_cast<size_t>(block_index()) * num_warps + static_cast<size_t>(warp.warp());
  const size_t total =
      args.begins != nullptr ? args.num_blocks : ceil_div(args.numel, args.block_numel);
  for (size_t block = first; block < total;
       block += static_cast<size_t>(num_blocks()) * num_warps) {
    size_t begin = block * args.block_numel;
    size_t end = begin + args.block_numel < args.numel ? begin + args.block_numel : args.numel;
    if (args.begins != nullptr) {
      begin = peer::load_plain(args.begins + block);
      end = peer::load_plain(args.begins + block + 1);
    }
    std::byte* const data = static_cast<std::byte*>(args.data) + begin * kItem;
    std::byte* const codes = static_cast<std::byte*>(args.codes) + begin;
    fn(block, QuantisedBlock<Data>{data, codes, end - begin,
                                   RunSplit::of<Data, Code>(data, codes, end - begin)});
  }
}

template <class Data, class Code>
struct QuantiseKernel {
  using Args = QuantiseArgs;
  static constexpr int kMaxThreads = 256;

  static PYCOLL_DEVICE void run(const Args& args) {
    for_each_block<Data, Code>(args, [&](size_t index, const QuantisedBlock<Data>& block) {
      const float scale = block_scale<Code>(max_of_warp(largest(block)));
      if (WarpGroup{}.thread_rank() == 0) store_scale(args.scales + index, scale);
      encode(block, scale);
    });
  }

 private:
  static constexpr size_t kItem = sizeof(typename Data::Storage);

  // Of this lane's elements.
  static PYCOLL_DEVICE uint32_t largest(const QuantisedBlock<Data>& block) {
    uint32_t amax = 0;
    const auto note = [&](float x) {
      const uint32_t bits = magnitude_bits(x);
      if (bits > amax) amax = bits;
    };
    block.for_each(
        [&](size_t i) {
          float x[kQuantisedRun];
          Run<Data, kQuantisedRun>::load_vectors(block.data + i * kItem, x);
#pragma unroll
          for (int k = 0; k < kQuantisedRun; ++k) note(x[k]);
        },
        [&](size_t i) { note(load_scalar<Data>(block.data + i * kItem)); });
    return amax;
  }

  static PYCOLL_DEVICE void encode(const QuantisedBlock<Data>& block, float scale) {
    block.for_each(
        [&](size_t i) {
          float x[kQuantisedRun];
          Run<Data, kQuantisedRun>::load_vectors(block.data + i * kItem, x);
#pragma unroll
          for (int k = 0; k < kQuantisedRun; ++k) x[k] = scaled_down(x[k], scale);
          Run<Code, kQuantisedRun>::store_vectors(block.codes + i, x);
        },
        [&](size_t i) {
          const float x = load_scalar<Data>(block.data + i * kItem);
          store_scalar<Code>(block.codes + i, scaled_down(x, scale));
        });
  }
};

template <class Data, class Code>
struct DequantiseKernel {
  using Args = QuantiseArgs;
  static constexpr int kMaxThreads = 256;

  static PYCOLL_DEVICE void run(const Args& args) {
    for_each_block<Data, Code>(args, [&](size_t index, const QuantisedBlock<Data>& block) {
      decode(block, load_scale(args.scales + index));
    });
  }

 private:
  static constexpr size_t kItem = sizeof(typename Data::Storage);

  static PYCOLL_DEVICE void decode(const QuantisedBlock<Data>& block, float scale) {
    block.for_each(
        [&](size_t i) {
          float x[kQuantisedRun];
          Run<Code, kQuantisedRun>::load_vectors(block.codes + i, x);
#pragma unroll
          for (int k = 0; k < kQuantisedRun; ++k) x[k] = rounded_product(x[k], scale);
          Run<Data, kQuantisedRun>::store_vectors(block.data + i * kItem, x);
        },
        [&](size_t i) {
          const float x = rounded_product(load_scalar<Code>(block.codes + i), scale);
          store_scalar<Data>(block.data + i * kItem, x);
        });
  }
};

}  // namespace pycoll::cuda
