// Flatten and unflatten: thousands of tensors in one launch.
//
// The bucket is cut into tiles; a warp takes a tile, finds the first tensor in it by bisection, and walks over the tensors until
// the tile ends. So the host prepares nothing but the table, small tensors cost a few lanes rather than a block, and a large one is
// spread over as many warps as it has tiles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/bucket.h"
#include "kernels/cuda/float_io.cuh"
#include "kernels/cuda/thread_group.cuh"

namespace pycoll::cuda {

enum class Direction { kFlatten, kUnflatten };

// `From` and `To` are the element types on the way from tensors to bucket, or from bucket to tensors.
template <class From, class To, Direction kDirection>
struct BucketKernel {
  using Args = BucketArgs;
  static constexpr int kMaxThreads = 256;
  static constexpr size_t kTileNumel = 2048;

  static PYCOLL_DEVICE void run(const Args& args) {
    const WarpGroup warp;
    float scale = args.scale;
    if (args.device_scale != nullptr) scale *= load_scale(args.device_scale);
    const auto num_warps = static_cast<size_t>(warp.num_warps());
    const auto first =
        static_cast<size_t>(block_index()) * num_warps + static_cast<size_t>(warp.warp());
    const size_t num_tiles = ceil_div(args.bucket_numel, kTileNumel);
    uint32_t amax = 0;
    for (size_t tile = first; tile < num_tiles;
         tile += static_cast<size_t>(num_blocks()) * num_warps)
      do_tile(args, warp, tile, scale, amax);
    if (args.amax == nullptr) return;
    amax = max_of_warp(amax);
    if (warp.thread_rank() == 0 && amax > 0) peer::fetch_max_relaxed(args.amax, amax);
  }

 private:
  // As many as the narrower type has in 16 bytes.
  static constexpr int kRun =
      16 / static_cast<int>(sizeof(typename From::Storage) < sizeof(typename To::Storage)
                                ? sizeof(typename From::Storage)
                                : sizeof(typename To::Storage));
  static constexpr bool kFlattens = kDirection == Direction::kFlatten;

  static PYCOLL_DEVICE BucketTensor tensor(const Args& args, size_t index) {
    const auto* fields = reinterpret_cast<const uint64_t*>(args.tensors + index);
    return {peer::load_plain(fields), peer::load_plain(fields + 1), peer::load_plain(fields + 2)};
  }

  // The first tensor that ends behind `place`.
  static PYCOLL_DEVICE size_t first_tensor(const Args& args, size_t place) {
    size_t low = 0, high = args.num_tensors;
    while (low < high) {
      const size_t middle = low + (high - low) / 2;
      const BucketTensor it = tensor(args, middle);
      if (it.begin + it.numel <= place) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  static PYCOLL_DEVICE void do_tile(const Args& args, const WarpGroup& warp, size_t tile,
                                    float scale, uint32_t& amax) {
    const size_t begin = tile * kTileNumel;
    const size_t end = begin + kTileNumel;
    for (size_t i = first_tensor(args, begin); i < args.num_tensors; ++i) {
      const BucketTensor it = tensor(args, i);
      if (it.begin >= end) return;
      const size_t from = it.begin > begin ? it.begin : begin;
      const size_t to = it.begin + it.numel < end ? it.begin + it.numel : end;
      do_piece(args, warp, it, {from, to - from}, scale, amax);
    }
  }

  // Elements `range` of the bucket, all of one tensor.
  static PYCOLL_DEVICE void do_piece(const Args& args, const WarpGroup& warp,
                                     const BucketTensor& it, Range range, float scale,
                                     uint32_t& amax) {
    constexpr size_t kTensorItem = sizeof(typename From::Storage);
    const size_t offset = range.begin - it.begin;
    std::byte* const bucket =
        static_cast<std::byte*>(args.bucket) +
        range.begin * (kFlattens ? sizeof(typename To::Storage) : sizeof(typename From::Storage));
    std::byte* const data =
        it.data == 0 ? nullptr
                     : reinterpret_cast<std::byte*>(it.data) +
                           offset * (kFlattens ? kTensorItem : sizeof(typename To::Storage));
    const std::byte* const source = kFlattens ? data : bucket;
    std::byte* const target = kFlattens ? bucket : data;
    if (target == nullptr || (source == nullptr && args.accumulate)) return;
    size_t done = 0;
    if (is_vector_aligned(source) && is_vector_aligned(target)) {
      done = range.numel / kRun * kRun;
      for (auto i = static_cast<size_t>(warp.thread_rank()) * kRun; i < done;
           i += kWarpThreads * kRun)
        do_run(args, source, target, i, scale, amax);
    }
    for (size_t i = done + static_cast<size_t>(warp.thread_rank()); i < range.numel;
         i += kWarpThreads)
      do_element(args, source, target, i, scale, amax);
  }

  static PYCOLL_DEVICE void do_run(const Args& args, const std::byte* source, std::byte* target,
                                   size_t i, float scale, uint32_t& amax) {
    float x[kRun] = {};
    if (source != nullptr)
      Run<From, kRun>::load_vectors(source + i * sizeof(typename From::Storage), x);
    std::byte* const to = target + i * sizeof(typename To::Storage);
    float before[kRun] = {};
    if (args.accumulate) Run<To, kRun>::load_vectors(to, before);
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      note(x[k], amax);
      x[k] = scaled(args, x[k], scale, before[k]);
    }
    Run<To, kRun>::store_vectors(to, x);
  }

  static PYCOLL_DEVICE void do_element(const Args& args, const std::byte* source, std::byte* target,
                                       size_t i, float scale, uint32_t& amax) {
    std::byte* const to = target + i * sizeof(typename To::Storage);
    float x = 0.0f;
    if (source != nullptr) x = load_scalar<From>(source + i * sizeof(typename From::Storage));
    note(x, amax);
    store_scalar<To>(to, scaled(args, x, scale, args.accumulate ? load_scalar<To>(to) : 0.0f));
  }

  static PYCOLL_DEVICE float scaled(const Args& args, float x, float scale, float before) {
    const float product = rounded_product(x, scale);
    return args.accumulate ? before + product : product;
  }
  static PYCOLL_DEVICE void note(float x, uint32_t& amax) {
    const uint32_t bits = magnitude_bits(x);
    if (bits > amax) amax = bits;
  }
};

}  // namespace pycoll::cuda
