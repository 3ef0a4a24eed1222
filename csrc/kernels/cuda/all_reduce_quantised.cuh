// all_reduce in two shots (all_reduce_two_shot.cuh has the protocol) with a wire type of its own: what travels are codes of 8 bits and
// one float32 scale for each block of elements, about a quarter of the bytes of float32.
//
// Chunks and segments are counted in blocks. A slot holds the codes of its blocks, then their scales. Sixteen elements are a lane's
// work, so block_numel / 16 lanes take a block and a warp takes several blocks at once. A rank's own input goes through its own slot
// like the others', and its own result too: nobody has better numbers than the rest.
#pragma once

#include "kernels/cuda/block_scale.cuh"
#include "kernels/cuda/direct.cuh"
#include "kernels/cuda/float_io.cuh"

namespace pycoll::cuda {

template <class Data, class Code>
struct AllReduceQuantisedKernel {
  using Args = AllReduceQuantisedArgs;
  static constexpr int kMaxThreads = 256;
  static constexpr int kIn = 0;
  static constexpr int kOut = 1;

  static PYCOLL_DEVICE void run(const Args& args) {
    const BlockGroup block;
    const Meeting meeting(args.group, block);
    if (!meeting.begin({}, nullptr)) return;
    const DirectLanes lanes(args.group, args.staging, block, meeting.epoch());
    const size_t num_scaled = ceil_div(args.numel, args.block_numel);
    const Partition chunks(num_scaled, static_cast<size_t>(args.group.world_size));
    const Wire wire(args);
    const BlockSegments largest(chunks.part(0).numel, wire.slot_blocks);
    for (size_t j = 0; largest.has(j); ++j) {
      const auto done = static_cast<uint32_t>(j + 1);
      send_inputs(args, lanes, wire, chunks, j);
      lanes.post(kIn, done, Everybody{});
      if (!lanes.wait(kIn, done, Phase::kDirectIn, Everybody{})) return;
      reduce_own_chunk(args, lanes, wire, chunks, j);
      lanes.post(kOut, done, Everybody{});
      if (!lanes.wait(kOut, done, Phase::kDirectOut, Everybody{})) return;
      copy_results(args, lanes, wire, chunks, j);
    }
    meeting.end();
  }

 private:
  static constexpr int kRun = 16;
  using Floats = float[kRun];

  // Where things are in a slot, and which lanes take which block.
  struct Wire {
    size_t block_numel;
    int lanes_per_block;
    size_t slot_blocks;

    PYCOLL_DEVICE explicit Wire(const Args& args)
        : block_numel(args.block_numel),
          lanes_per_block(static_cast<int>(args.block_numel) / kRun),
          slot_blocks(args.staging.slot_units * kUnitBytes / (args.block_numel + sizeof(float))) {}

    PYCOLL_DEVICE std::byte* codes(Vector16* slot, size_t block, int run) const {
      return reinterpret_cast<std::byte*>(slot) + block * block_numel +
             static_cast<size_t>(run * kRun);
    }
    PYCOLL_DEVICE float* scale(Vector16* slot, size_t block) const {
      return reinterpret_cast<float*>(reinterpret_cast<std::byte*>(slot) +
                                      slot_blocks * block_numel) +
             block;
    }
  };

  // Calls `fn(block, run, is_there)` for this lane's run of each block of a segment; all lanes call it together.
  template <class Fn>
  static PYCOLL_DEVICE void for_each_run(const Wire& wire, size_t num_blocks_of_segment, Fn fn) {
    const WarpGroup warp;
    const int blocks_per_warp = kWarpThreads / wire.lanes_per_block;
    const int run = warp.thread_rank() % wire.lanes_per_block;
    const size_t stride = static_cast<size_t>(warp.num_warps() * blocks_per_warp);
    for (auto first = static_cast<size_t>(warp.warp() * blocks_per_warp);
         first < num_blocks_of_segment; first += stride) {
      const size_t block = first + static_cast<size_t>(warp.thread_rank() / wire.lanes_per_block);
      fn(block, run, block < num_blocks_of_segment);
    }
  }

  // In blocks of the whole data.
  static PYCOLL_DEVICE Range segment_of(const Wire& wire, const Partition& chunks, int rank,
                                        size_t iteration) {
    const Range chunk = chunks.part(static_cast<size_t>(rank));
    Range segment = BlockSegments(chunk.numel, wire.slot_blocks).segment(iteration);
    segment.begin += chunk.begin;
    return segment;
  }
  static PYCOLL_DEVICE bool takes_part(const Args& args, const DirectLanes& lanes, int rank) {
    return rank == args.group.rank || lanes.is_peer(rank);
  }

  // ---- runs in registers

  static PYCOLL_DEVICE void load_data(const Args& args, size_t begin, Floats& x) {
    constexpr size_t kItem = sizeof(typename Data::Storage);
    const auto* const from = static_cast<const std::byte*>(args.input) + begin * kItem;
    if (begin + kRun <= args.numel && is_vector_aligned(from))
      return Run<Data, kRun>::load_vectors(from, x);
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      x[i] = begin + static_cast<size_t>(i) < args.numel
                 ? load_scalar<Data>(from + static_cast<size_t>(i) * kItem)
                 : 0.0f;
  }
  static PYCOLL_DEVICE void store_data(const Args& args, size_t begin, const Floats& x) {
    constexpr size_t kItem = sizeof(typename Data::Storage);
    auto* const to = static_cast<std::byte*>(args.output) + begin * kItem;
    if (begin + kRun <= args.numel && is_vector_aligned(to))
      return Run<Data, kRun>::store_vectors(to, x);
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      if (begin + static_cast<size_t>(i) < args.numel)
        store_scalar<Data>(to + static_cast<size_t>(i) * kItem, x[i]);
  }

  // The scale of the block that this lane's run belongs to.
  static PYCOLL_DEVICE float common_scale(const Wire& wire, const Floats& x) {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const uint32_t bits = magnitude_bits(x[i]);
      if (bits > amax) amax = bits;
    }
    for (int lanes = wire.lanes_per_block / 2; lanes > 0; lanes /= 2) {
      const uint32_t other = __shfl_xor_sync(kWholeWarp, amax, lanes);
      if (other > amax) amax = other;
    }
    return block_scale<Code>(amax);
  }
  static PYCOLL_DEVICE void encode(const Wire& wire, Vector16* slot, size_t block, int run,
                                   const Floats& x, float scale) {
    const float inverse = reciprocal(scale);
    Floats scaled;
#pragma unroll
    for (int i = 0; i < kRun; ++i) scaled[i] = rounded_product(x[i], inverse);
    Run<Code, kRun>::store_vectors(wire.codes(slot, block, run), scaled);
    if (run == 0) store_scale(wire.scale(slot, block), scale);
  }
  static PYCOLL_DEVICE void decode(const Wire& wire, Vector16* slot, size_t block, int run,
                                   Floats& x) {
    const float scale = load_scale(wire.scale(slot, block));
    Run<Code, kRun>::load_vectors(wire.codes(slot, block, run), x);
#pragma unroll
    for (int i = 0; i < kRun; ++i) x[i] = rounded_product(x[i], scale);
  }

  // ---- the three parts of an iteration

  static PYCOLL_DEVICE void send_inputs(const Args& args, const DirectLanes& lanes,
                                        const Wire& wire, const Partition& chunks,
                                        size_t iteration) {
    for (int dst = 0; dst < args.group.world_size; ++dst) {
      if (!takes_part(args, lanes, dst)) continue;
      const Range segment = segment_of(wire, chunks, dst, iteration);
      Vector16* const slot = lanes.slot(kIn, dst, args.group.rank);
      for_each_run(wire, segment.numel, [&](size_t block, int run, bool is_there) {
        Floats x = {};
        const size_t begin = (segment.begin + block) * wire.block_numel;
        if (is_there) load_data(args, begin + static_cast<size_t>(run * kRun), x);
        const float scale = common_scale(wire, x);
        if (is_there) encode(wire, slot, block, run, x, scale);
      });
    }
  }

  static PYCOLL_DEVICE void reduce_own_chunk(const Args& args, const DirectLanes& lanes,
                                             const Wire& wire, const Partition& chunks,
                                             size_t iteration) {
    const int self = args.group.rank;
    const Range segment = segment_of(wire, chunks, self, iteration);
    for_each_run(wire, segment.numel, [&](size_t block, int run, bool is_there) {
      Floats sum = {};
      bool is_first = true;
      for (int rank = 0; is_there && rank < args.group.world_size; ++rank) {
        if (!takes_part(args, lanes, rank)) continue;
        Floats term;
        decode(wire, lanes.slot(kIn, self, rank), block, run, term);
#pragma unroll
        for (int i = 0; i < kRun; ++i) sum[i] = is_first ? term[i] : sum[i] + term[i];
        is_first = false;
      }
      if (args.divisor > 0) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) sum[i] = sum[i] / static_cast<float>(args.divisor);
      }
      const float scale = common_scale(wire, sum);
      for (int dst = 0; is_there && dst < args.group.world_size; ++dst)
        if (takes_part(args, lanes, dst))
          encode(wire, lanes.slot(kOut, dst, self), block, run, sum, scale);
    });
  }

  static PYCOLL_DEVICE void copy_results(const Args& args, const DirectLanes& lanes,
                                         const Wire& wire, const Partition& chunks,
                                         size_t iteration) {
    for (int src = 0; src < args.group.world_size; ++src) {
      if (!takes_part(args, lanes, src)) continue;
      const Range segment = segment_of(wire, chunks, src, iteration);
      Vector16* const slot = lanes.slot(kOut, args.group.rank, src);
      for_each_run(wire, segment.numel, [&](size_t block, int run, bool is_there) {
        if (!is_there) return;
        Floats x;
        decode(wire, slot, block, run, x);
        const size_t begin = (segment.begin + block) * wire.block_numel;
        store_data(args, begin + static_cast<size_t>(run * kRun), x);
      });
    }
  }
};

}  // namespace pycoll::cuda
