// Each rank adds up one chunk of the data and hands the result to all: two trips, 2 (n - 1) / n S bytes sent and received.
//
// In iteration j a block
//
//   1. writes segment j of every other rank's chunk into its in-slot there, and posts in;
//   2. waits for in of all, adds the ranks' segments of its own chunk in rank order, writes the result to its output and into
//      its out-slot of every rank, and posts out;
//   3. waits for out of all, and copies their results to its output.
//
// One slot each way suffices. In-slot: a rank writes segment j + 1 after it has seen out(j) of its owner, who posted that after it
// had read segment j. Out-slot: a rank writes segment j + 1 after it has seen in(j + 1) of its owner, who posted that after it had
// copied segment j. (tests/spin/cuda_two_shot.pml.)
//
// Input and output may be the same: a segment of a chunk is written after all of this block have sent it.
#pragma once

#include "kernels/cuda/direct.cuh"
#include "kernels/cuda/edges.cuh"
#include "kernels/cuda/elements.cuh"
#include "topology/ring.h"

namespace pycoll::cuda {

template <class Element>
struct AllReduceTwoShotKernel {
  using Args = AllReduceTwoShotArgs;
  static constexpr int kMaxThreads = 512;
  static constexpr int kIn = 0;
  static constexpr int kOut = 1;

  static PYCOLL_DEVICE void run(const Args& args) {
    PYCOLL_SHARED(double, factors, kMaxRanks);
    const BlockGroup block;
    const Meeting meeting(args.group, block);
    if (!meeting.begin({args.reduction.factor}, factors)) return;
    const DirectLanes lanes(args.group, args.staging, block, meeting.epoch());
    // The first chunk is the largest, so all ranks count the same iterations.
    const size_t num_iterations = segments_of(args, 0).num_iterations();
    for (size_t j = 0; j < num_iterations; ++j) {
      const auto done = static_cast<uint32_t>(j + 1);
      send_inputs(args, block, lanes, j);
      lanes.post(kIn, done, Everybody{});
      if (!lanes.wait(kIn, done, Phase::kDirectIn, Everybody{})) return;
      reduce_own_chunk(args, block, lanes, j, factors);
      lanes.post(kOut, done, Everybody{});
      if (!lanes.wait(kOut, done, Phase::kDirectOut, Everybody{})) return;
      copy_results(args, block, lanes, j);
    }
    meeting.end();
  }

 private:
  static constexpr size_t kItem = sizeof(typename Element::Storage);

  static PYCOLL_DEVICE Range chunk_of(const Args& args, int rank) {
    return part(ceil_div(args.numel * kItem, kUnitBytes),
                static_cast<size_t>(args.group.world_size), static_cast<size_t>(rank));
  }
  static PYCOLL_DEVICE BlockSegments segments_of(const Args& args, int rank) {
    return {chunk_of(args, rank).numel, args.staging.slot_units};
  }
  static PYCOLL_DEVICE int next(const Args& args, int rank) {
    return ring::next(rank, args.group.world_size);
  }

  static PYCOLL_DEVICE void send_inputs(const Args& args, const BlockGroup& block,
                                        const DirectLanes& lanes, size_t iteration) {
    const auto input = input_units<Element>(args.input, 0, args.numel);
    const Share share = share_of_thread(block);
    for (int dst = next(args, args.group.rank); dst != args.group.rank; dst = next(args, dst)) {
      if (!lanes.is_peer(dst)) continue;
      const size_t chunk_begin = chunk_of(args, dst).begin;
      const Range segment = segments_of(args, dst).segment(iteration);
      Vector16* const slot = lanes.slot(kIn, dst, args.group.rank);
      for (size_t i = share.first; i < segment.numel; i += share.stride)
        peer::store_plain(slot + i, input.load(chunk_begin + segment.begin + i));
    }
  }

  static PYCOLL_DEVICE void reduce_own_chunk(const Args& args, const BlockGroup& block,
                                             const DirectLanes& lanes, size_t iteration,
                                             const double* factors) {
    const int self = args.group.rank;
    const auto input = input_units<Element>(args.input, 0, args.numel);
    const auto output = output_units<Element>(args.output, 0, args.numel);
    const size_t chunk_begin = chunk_of(args, self).begin;
    const Range segment = segments_of(args, self).segment(iteration);
    const Share share = share_of_thread(block);
    for (size_t i = share.first; i < segment.numel; i += share.stride) {
      const size_t unit = chunk_begin + segment.begin + i;
      const auto takes_part = [&](int rank) { return rank == self || lanes.is_peer(rank); };
      const auto load = [&](int rank) {
        return rank == self ? input.load(unit) : peer::load_plain(lanes.slot(kIn, self, rank) + i);
      };
      const Vector16 result = reduce_in_rank_order<Element>(
          args.reduction, factors, args.group.world_size, takes_part, load);
      output.store(unit, result);
      for (int dst = next(args, self); dst != self; dst = next(args, dst))
        if (lanes.is_peer(dst)) peer::store_plain(lanes.slot(kOut, dst, self) + i, result);
    }
  }

  static PYCOLL_DEVICE void copy_results(const Args& args, const BlockGroup& block,
                                         const DirectLanes& lanes, size_t iteration) {
    const auto output = output_units<Element>(args.output, 0, args.numel);
    const Share share = share_of_thread(block);
    for (int src = next(args, args.group.rank); src != args.group.rank; src = next(args, src)) {
      if (!lanes.is_peer(src)) continue;
      const size_t chunk_begin = chunk_of(args, src).begin;
      const Range segment = segments_of(args, src).segment(iteration);
      const Vector16* const slot = lanes.slot(kOut, args.group.rank, src);
      for (size_t i = share.first; i < segment.numel; i += share.stride)
        output.store(chunk_begin + segment.begin + i, peer::load_plain(slot + i));
    }
  }
};

}  // namespace pycoll::cuda
