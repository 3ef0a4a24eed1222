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
  static constexpr int kMaxThreads = 256;
  static constexpr int kIn = 0;
  static constexpr int kOut = 1;

  static PYCOLL_DEVICE void run(const Args& args) {
    PYCOLL_SHARED(double, factors, kMaxRanks);
    const BlockGroup block;
    const Meeting meeting(args.group, block);
    if (!meeting.begin({args.reduction.factor}, factors)) return;
    const DirectLanes lanes(args.group, args.staging, block, meeting.epoch());
    const Partition chunks(ceil_div(args.numel * kItem, kUnitBytes),
                           static_cast<size_t>(args.group.world_size));
    // The first chunk is the largest, so all ranks count the same iterations.
    const BlockSegments largest(chunks.part(0).numel, args.staging.slot_units);
    for (size_t j = 0; largest.has(j); ++j) {
      const auto done = static_cast<uint32_t>(j + 1);
      send_inputs(args, block, lanes, chunks, j);
      lanes.post(kIn, done, Everybody{});
      if (!lanes.wait(kIn, done, Phase::kDirectIn, Everybody{})) return;
      reduce_own_chunk(args, block, lanes, chunks, j, factors);
      lanes.post(kOut, done, Everybody{});
      if (!lanes.wait(kOut, done, Phase::kDirectOut, Everybody{})) return;
      copy_results(args, block, lanes, chunks, j);
    }
    meeting.end();
  }

 private:
  static constexpr size_t kItem = sizeof(typename Element::Storage);

  // In units of the whole data.
  static PYCOLL_DEVICE Range segment_of(const Args& args, const Partition& chunks, int rank,
                                        size_t iteration) {
    const Range chunk = chunks.part(static_cast<size_t>(rank));
    Range segment = BlockSegments(chunk.numel, args.staging.slot_units).segment(iteration);
    segment.begin += chunk.begin;
    return segment;
  }
  static PYCOLL_DEVICE int next(const Args& args, int rank) {
    return ring::next(rank, args.group.world_size);
  }

  static PYCOLL_DEVICE void send_inputs(const Args& args, const BlockGroup& block,
                                        const DirectLanes& lanes, const Partition& chunks,
                                        size_t iteration) {
    const auto input = input_units<Element>(args.input, 0, args.numel);
    const Share share = share_of_thread(block);
    for (int dst = next(args, args.group.rank); dst != args.group.rank; dst = next(args, dst)) {
      if (!lanes.is_peer(dst)) continue;
      const Range segment = segment_of(args, chunks, dst, iteration);
      Vector16* const slot = lanes.slot(kIn, dst, args.group.rank);
      for (size_t i = share.first; i < segment.numel; i += share.stride)
        peer::store_plain(slot + i, input.load(segment.begin + i));
    }
  }

  static PYCOLL_DEVICE void reduce_own_chunk(const Args& args, const BlockGroup& block,
                                             const DirectLanes& lanes, const Partition& chunks,
                                             size_t iteration, const double* factors) {
    const int self = args.group.rank;
    const auto input = input_units<Element>(args.input, 0, args.numel);
    const auto output = output_units<Element>(args.output, 0, args.numel);
    const Range segment = segment_of(args, chunks, self, iteration);
    const Share share = share_of_thread(block);
    for (size_t i = share.first; i < segment.numel; i += share.stride) {
      const size_t unit = segment.begin + i;
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
                                         const DirectLanes& lanes, const Partition& chunks,
                                         size_t iteration) {
    const auto output = output_units<Element>(args.output, 0, args.numel);
    const Share share = share_of_thread(block);
    for (int src = next(args, args.group.rank); src != args.group.rank; src = next(args, src)) {
      if (!lanes.is_peer(src)) continue;
      const Range segment = segment_of(args, chunks, src, iteration);
      const Vector16* const slot = lanes.slot(kOut, args.group.rank, src);
      for (size_t i = share.first; i < segment.numel; i += share.stride)
        output.store(segment.begin + i, peer::load_plain(slot + i));
    }
  }
};

}  // namespace pycoll::cuda
