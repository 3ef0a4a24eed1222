#pragma once

#include "kernels/cuda/direct.cuh"
#include "kernels/cuda/wire.cuh"

namespace pycoll::cuda {

template <class Wire>
struct AllReduceTwoShotKernel {
  using Args = AllReduceTwoShotArgs;
  static constexpr int kMaxThreads = 256;
  static constexpr int kIn = 0;
  static constexpr int kOut = 1;

  static PYCOLL_DEVICE void run(const Args& args) {
    PYCOLL_SHARED(double, factors, kMaxRanks);
    const Wire wire(args.wire, args.staging.slot_units, args.lead_bytes);
    const PartSegments segments(wire.num_blocks(0, args.numel), args.group.world_size,
                                wire.blocks_in_slot());
    const auto iterate = [&](const DirectLanes& lanes, size_t j) {
      const auto done = static_cast<uint32_t>(j + 1);
      send_inputs(args, lanes, wire, segments, j);
      lanes.post(kIn, done, Everybody{});
      if (!lanes.wait(kIn, done, Phase::kDirectIn, Everybody{})) return false;
      reduce_own_chunk(args, lanes, wire, segments, j, factors);
      lanes.post(kOut, done, Everybody{});
      if (!lanes.wait(kOut, done, Phase::kDirectOut, Everybody{})) return false;
      copy_results(args, lanes, wire, segments, j);
      return true;
    };
    run_iterations<DirectLanes>(args, {args.reduction.factor}, factors, segments.largest(),
                                iterate);
  }

 private:
  using Position = typename Wire::Position;

  static PYCOLL_DEVICE void send_inputs(const Args& args, const DirectLanes& lanes,
                                        const Wire& wire, const PartSegments& segments, size_t j) {
    const auto input = wire.source(args.input, 0, args.numel);
    lanes.for_each_peer([&](int dst) {
      const Range segment = segments.segment(dst, j);
      Vector16* const slot = lanes.slot(kIn, dst, args.group.rank);
      wire.for_each(share_of_thread(lanes.block()), segment.numel, [&](const Position& at) {
        wire.put(slot, at, wire.load(input, segment.begin, at));
        return true;
      });
    });
  }

  static PYCOLL_DEVICE void reduce_own_chunk(const Args& args, const DirectLanes& lanes,
                                             const Wire& wire, const PartSegments& segments,
                                             size_t j, const double* factors) {
    const int self = args.group.rank;
    const auto input = wire.source(args.input, 0, args.numel);
    const auto output = wire.target(args.output, 0, args.numel);
    const Range segment = segments.segment(self, j);
    wire.for_each(share_of_thread(lanes.block()), segment.numel, [&](const Position& at) {
      const auto own = wire.load(input, segment.begin, at);
      RankOrderSum<Wire> sum(args.reduction, factors);
      for (int rank = 0; rank < args.group.world_size; ++rank) {
        if (!lanes.takes_part(rank)) continue;
        sum.add(rank, wire.widen(rank == self ? own : wire.get(lanes.slot(kIn, self, rank), at)));
      }
      const auto result = wire.narrow(sum.result(), at);
      wire.store(output, segment.begin, at, result);
      lanes.for_each_peer([&](int dst) { wire.put(lanes.slot(kOut, dst, self), at, result); });
      return true;
    });
  }

  static PYCOLL_DEVICE void copy_results(const Args& args, const DirectLanes& lanes,
                                         const Wire& wire, const PartSegments& segments, size_t j) {
    const auto output = wire.target(args.output, 0, args.numel);
    lanes.for_each_peer([&](int src) {
      const Range segment = segments.segment(src, j);
      Vector16* const slot = lanes.slot(kOut, args.group.rank, src);
      wire.for_each(share_of_thread(lanes.block()), segment.numel, [&](const Position& at) {
        wire.store(output, segment.begin, at, wire.get(slot, at));
        return true;
      });
    });
  }
};

}  // namespace pycoll::cuda
