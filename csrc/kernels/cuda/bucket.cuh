// Flatten and unflatten: thousands of tensors in one launch.
//
// The bucket is cut into tiles; a warp takes a tile, finds the first tensor in it by bisection, and walks over the tensors until
// the tile ends. So the host prepares nothing but the table, small tensors cost a few lanes rather than a block, and a large one is
// spread over as many warps as it has tiles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/bucket.h"
#include "kernels/cuda/float_io.cuh"
#include "kernels/cuda/thread_group.cuh"

namespace pycoll::cuda {

// Elements that are moved and not computed with, by their size.
template <DType kType, class T>
struct RawElement {
  static constexpr DType kDType = kType;
  using Storage = T;
  using Accumulate = T;
  static PYCOLL_DEVICE T widen(T x) { return x; }
  static PYCOLL_DEVICE T narrow(T x) { return x; }
};

// `From` and `To` are the element types on the way from tensors to bucket, or from bucket to tensors.
template <class From, class To>
struct BucketKernel {
  using Args = BucketArgs;
  static constexpr int kMaxThreads = 256;
  static constexpr size_t kTileNumel = 2048;

  static PYCOLL_DEVICE void run(const Args& args) {
    const WarpGroup warp;
    auto scale = static_cast<Factor>(args.scale);
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
  using Wide = typename From::Accumulate;
  static constexpr bool kComputes = std::is_floating_point_v<Wide>;
  using Factor = std::conditional_t<kComputes, Wide, float>;
  static constexpr size_t kFromItem = sizeof(typename From::Storage);
  static constexpr size_t kToItem = sizeof(typename To::Storage);
  // As many as the narrower type has in 16 bytes.
  static constexpr int kRun = static_cast<int>(16 / (kFromItem < kToItem ? kFromItem : kToItem));

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
                                    Factor scale, uint32_t& amax) {
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
                                     const BucketTensor& it, Range range, Factor scale,
                                     uint32_t& amax) {
    const size_t offset = range.begin - it.begin;
    const bool flattens = args.direction == Direction::kFlatten;
    std::byte* const bucket =
        static_cast<std::byte*>(args.bucket) + range.begin * (flattens ? kToItem : kFromItem);
    std::byte* const data = it.data == 0 ? nullptr
                                         : reinterpret_cast<std::byte*>(it.data) +
                                               offset * (flattens ? kFromItem : kToItem);
    const std::byte* const source = flattens ? data : bucket;
    std::byte* const target = flattens ? bucket : data;
    if (target == nullptr || (source == nullptr && args.accumulate)) return;
    const RunSplit split = RunSplit::of<From, To>(source, target, range.numel);
    const auto lane = static_cast<size_t>(warp.thread_rank());
    for (size_t i = split.begin() + lane * kRun; i < split.end(); i += kWarpThreads * kRun)
      do_run(args, source, target, i, scale, amax);
    for (size_t i = lane; i < split.num_single(range.numel); i += kWarpThreads)
      do_element(args, source, target, split.single(i), scale, amax);
  }

  static PYCOLL_DEVICE void do_run(const Args& args, const std::byte* source, std::byte* target,
                                   size_t i, Factor scale, uint32_t& amax) {
    Wide x[kRun] = {};
    std::byte* const to = target + i * kToItem;
    // Nothing is made of what is missing: zero times a negative factor would be another zero.
    if (source != nullptr) {
      Run<From, kRun>::load_vectors(source + i * kFromItem, x);
      Wide before[kRun] = {};
      if (args.accumulate) Run<To, kRun>::load_vectors(to, before);
#pragma unroll
      for (int k = 0; k < kRun; ++k) x[k] = computed(args, x[k], scale, before[k], amax);
    }
    Run<To, kRun>::store_vectors(to, x);
  }

  static PYCOLL_DEVICE void do_element(const Args& args, const std::byte* source, std::byte* target,
                                       size_t i, Factor scale, uint32_t& amax) {
    std::byte* const to = target + i * kToItem;
    Wide x = {};
    if (source != nullptr) {
      const Wide before = args.accumulate ? load_scalar<To>(to) : Wide{};
      x = computed(args, load_scalar<From>(source + i * kFromItem), scale, before, amax);
    }
    store_scalar<To>(to, x);
  }

  // What is stored for an element.
  static PYCOLL_DEVICE Wide computed(const Args& args, Wide x, Factor scale, Wide before,
                                     uint32_t& amax) {
    if constexpr (kComputes) {
      const uint32_t bits = magnitude_bits(static_cast<float>(x));
      if (bits > amax) amax = bits;
      const Wide product = rounded_product(x, scale);
      const Wide sum = args.accumulate ? before + product : product;
      if constexpr (kLargestCode<To> > 0) return clamped(sum, kLargestCode<To>);
      return sum;
    }
    return x;
  }
};

}  // namespace pycoll::cuda
