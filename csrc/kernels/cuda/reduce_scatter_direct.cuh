#pragma once

#include "kernels/cuda/direct.cuh"
#include "kernels/cuda/wire.cuh"

namespace pycoll::cuda {

template <class Wire>
struct ReduceScatterDirectKernel {
  using Args = ReduceScatterDirectArgs;
  static constexpr int kMaxThreads = 256;

  static PYCOLL_DEVICE void run(const Args& args) {
    PYCOLL_SHARED(double, factors, kMaxRanks);
    const Wire wire(args.wire, args.staging.slot_units, args.lead_bytes);
    const TableSegments segments(args.group.world_size, wire.blocks_in_slot(), [&](int rank) {
      return wire.num_blocks(args.chunks.begin[rank], args.chunks.numel[rank]);
    });
    const auto iterate = [&](const DirectLanes& lanes, size_t j) {
      const int area = static_cast<int>(j % kDirectAreas);
      const auto done = static_cast<uint32_t>(j + 1);
      lanes.for_each_peer(
          [&](int dst) { send(args, lanes, wire, dst, segments.segment(dst, j), area); });
      lanes.post(area, done, Everybody{});
      if (!lanes.wait(area, done, Phase::kDirectIn, Everybody{})) return false;
      reduce(args, lanes, wire, segments.segment(args.group.rank, j), area, factors);
      return true;
    };
    run_iterations<DirectLanes>(args, {args.reduction.factor}, factors, segments.largest(),
                                iterate);
  }

 private:
  using Position = typename Wire::Position;

  static PYCOLL_DEVICE auto input_chunk(const Args& args, const Wire& wire, int rank) {
    const size_t begin = args.chunks.begin[rank];
    return wire.source(wire.at(args.input, begin), begin, args.chunks.numel[rank]);
  }

  static PYCOLL_DEVICE void send(const Args& args, const DirectLanes& lanes, const Wire& wire,
                                 int dst, Range segment, int area) {
    const auto input = input_chunk(args, wire, dst);
    Vector16* const slot = lanes.slot(area, dst, args.group.rank);
    wire.for_each(share_of_thread(lanes.block()), segment.numel, [&](const Position& at) {
      wire.put(slot, at, wire.load(input, segment.begin, at));
      return true;
    });
  }

  static PYCOLL_DEVICE void reduce(const Args& args, const DirectLanes& lanes, const Wire& wire,
                                   Range segment, int area, const double* factors) {
    const int self = args.group.rank;
    const auto input = input_chunk(args, wire, self);
    const auto output = wire.target(args.output, args.chunks.begin[self], args.chunks.numel[self]);
    wire.for_each(share_of_thread(lanes.block()), segment.numel, [&](const Position& at) {
      const auto own = wire.load(input, segment.begin, at);
      RankOrderSum<Wire> sum(args.reduction, factors);
      for (int rank = 0; rank < args.group.world_size; ++rank) {
        if (!lanes.takes_part(rank)) continue;
        sum.add(rank, wire.widen(rank == self ? own : wire.get(lanes.slot(area, self, rank), at)));
      }
      wire.store_sum(output, segment.begin, at, sum.result());
      return true;
    });
  }
};

}  // namespace pycoll::cuda
