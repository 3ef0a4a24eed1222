// Every rank sends its chunk to all in codes (quantised_wire.cuh): one trip. Where elements travel as they are this is an exchange
// (exchange_direct.cuh). The protocol is that of reduce_scatter_direct.cuh, with copies for additions.
//
// A rank's own chunk becomes what it is for the others, so that all ranks have the same bits.
#pragma once

#include "kernels/cuda/direct.cuh"
#include "kernels/cuda/quantised_wire.cuh"

namespace pycoll::cuda {

template <class Wire>
struct AllGatherQuantisedKernel {
  using Args = AllGatherQuantisedArgs;
  static constexpr int kMaxThreads = 256;

  static PYCOLL_DEVICE void run(const Args& args) {
    const Wire wire(args.wire, args.staging.slot_units, 0);
    const TableSegments segments(args.group.world_size, wire.blocks_in_slot(), [&](int rank) {
      return wire.num_blocks(args.chunks.begin[rank], args.chunks.numel[rank]);
    });
    const auto iterate = [&](const DirectLanes& lanes, size_t j) {
      const int area = static_cast<int>(j % kDirectAreas);
      const auto done = static_cast<uint32_t>(j + 1);
      send(args, lanes, wire, segments.segment(args.group.rank, j), area);
      lanes.post(area, done, Everybody{});
      if (!lanes.wait(area, done, Phase::kDirectIn, Everybody{})) return false;
      lanes.for_each_peer(
          [&](int src) { receive(args, lanes, wire, src, segments.segment(src, j), area); });
      return true;
    };
    run_iterations<DirectLanes>(args, {}, nullptr, segments.largest(), iterate);
  }

 private:
  using Position = typename Wire::Position;

  static PYCOLL_DEVICE auto output_chunk(const Args& args, const Wire& wire, int rank) {
    const size_t begin = args.chunks.begin[rank];
    return wire.target(const_cast<void*>(wire.at(args.output, begin)), begin,
                       args.chunks.numel[rank]);
  }

  // To all peers, and to the own output; the input may be where that is.
  static PYCOLL_DEVICE void send(const Args& args, const DirectLanes& lanes, const Wire& wire,
                                 Range segment, int area) {
    const int self = args.group.rank;
    const auto input = wire.source(args.input, 0, args.chunks.numel[self]);
    const auto output = output_chunk(args, wire, self);
    wire.for_each(share_of_thread(lanes.block()), segment.numel, [&](const Position& at) {
      const auto own = wire.load(input, segment.begin, at);
      lanes.for_each_peer([&](int dst) { wire.put(lanes.slot(area, dst, self), at, own); });
      wire.store(output, segment.begin, at, own);
      return true;
    });
  }

  static PYCOLL_DEVICE void receive(const Args& args, const DirectLanes& lanes, const Wire& wire,
                                    int src, Range segment, int area) {
    const auto output = output_chunk(args, wire, src);
    Vector16* const slot = lanes.slot(area, args.group.rank, src);
    wire.for_each(share_of_thread(lanes.block()), segment.numel, [&](const Position& at) {
      wire.store(output, segment.begin, at, wire.get(slot, at));
      return true;
    });
  }
};

}  // namespace pycoll::cuda
