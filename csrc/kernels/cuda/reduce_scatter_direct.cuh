// Each rank gets its chunk from all and adds it up: one trip, (n - 1) / n S bytes sent and received.
//
// In iteration j a block writes segment j of every other rank's chunk into area j mod 2 there and posts; waits for all; and adds
// the ranks' segments of its own chunk in rank order.
//
// Two slots suffice, without acknowledgement: a rank writes segment j + 2 after it has seen the post j + 1 of the slot's owner, who
// made that after it had read segment j. (tests/spin/cuda_direct.pml; with one slot it fails.) All ranks go through as many
// iterations as the largest chunk has, whatever they have to send.
#pragma once

#include "kernels/cuda/direct.cuh"
#include "kernels/cuda/edges.cuh"
#include "kernels/cuda/elements.cuh"
#include "topology/ring.h"

namespace pycoll::cuda {

template <class Element>
struct ReduceScatterDirectKernel {
  using Args = ReduceScatterDirectArgs;
  static constexpr int kMaxThreads = 256;

  static PYCOLL_DEVICE void run(const Args& args) {
    PYCOLL_SHARED(double, factors, kMaxRanks);
    const BlockGroup block;
    const Meeting meeting(args.group, block);
    if (!meeting.begin({args.reduction.factor}, factors)) return;
    const DirectLanes lanes(args.group, args.staging, block, meeting.epoch());
    const BlockSegments largest = largest_segments(args);
    for (size_t j = 0; largest.has(j); ++j) {
      const int area = static_cast<int>(j % kDirectAreas);
      const auto done = static_cast<uint32_t>(j + 1);
      send(args, block, lanes, j, area);
      lanes.post(area, done, Everybody{});
      if (!lanes.wait(area, done, Phase::kDirectIn, Everybody{})) return;
      reduce(args, block, lanes, j, area, factors);
    }
    meeting.end();
  }

 private:
  static PYCOLL_DEVICE BlockSegments segments_of(const Args& args, int rank) {
    const size_t nbytes = args.chunks.numel[rank] * sizeof(typename Element::Storage);
    return {ceil_div(nbytes, kUnitBytes), args.staging.slot_units};
  }
  // Of the chunk that takes the most iterations.
  static PYCOLL_DEVICE BlockSegments largest_segments(const Args& args) {
    int largest = 0;
    for (int rank = 1; rank < args.group.world_size; ++rank)
      if (args.chunks.numel[rank] > args.chunks.numel[largest]) largest = rank;
    return segments_of(args, largest);
  }
  static PYCOLL_DEVICE auto input_chunk(const Args& args, int rank) {
    return input_units<Element>(args.input, args.chunks.begin[rank], args.chunks.numel[rank]);
  }

  static PYCOLL_DEVICE void send(const Args& args, const BlockGroup& block,
                                 const DirectLanes& lanes, size_t iteration, int area) {
    const int self = args.group.rank;
    const Share share = share_of_thread(block);
    for (int dst = ring::next(self, args.group.world_size); dst != self;
         dst = ring::next(dst, args.group.world_size)) {
      if (!lanes.is_peer(dst)) continue;
      const auto input = input_chunk(args, dst);
      const Range segment = segments_of(args, dst).segment(iteration);
      Vector16* const slot = lanes.slot(area, dst, self);
      for (size_t i = share.first; i < segment.numel; i += share.stride)
        peer::store_plain(slot + i, input.load(segment.begin + i));
    }
  }

  static PYCOLL_DEVICE void reduce(const Args& args, const BlockGroup& block,
                                   const DirectLanes& lanes, size_t iteration, int area,
                                   const double* factors) {
    const int self = args.group.rank;
    const auto input = input_chunk(args, self);
    const auto output = output_units<Element>(args.output, 0, args.chunks.numel[self]);
    const Range segment = segments_of(args, self).segment(iteration);
    const Share share = share_of_thread(block);
    for (size_t i = share.first; i < segment.numel; i += share.stride) {
      const size_t unit = segment.begin + i;
      const auto takes_part = [&](int rank) { return rank == self || lanes.is_peer(rank); };
      const auto load = [&](int rank) {
        return rank == self ? input.load(unit) : peer::load_plain(lanes.slot(area, self, rank) + i);
      };
      output.store(unit, reduce_in_rank_order<Element>(args.reduction, factors,
                                                       args.group.world_size, takes_part, load));
    }
  }
};

}  // namespace pycoll::cuda
