// reduce_scatter along a ring (ring.cuh): the first n steps of all_reduce, on chunks that the caller has cut.
#pragma once

#include "kernels/cuda/ring.cuh"

namespace pycoll::cuda {

template <class Element, class Lanes>
struct ReduceScatterRingKernel {
  using Args = ReduceScatterRingArgs;
  static constexpr int kMaxThreads = 256;

  static PYCOLL_DEVICE void run(const Args& args) {
    const BlockGroup block;
    const Meeting meeting(args.group, block);
    if (!meeting.begin({}, nullptr)) return;
    Lanes lanes(args.group, args.staging, block, meeting.epoch());
    const BlockSegments largest = largest_segments(args);
    for (size_t j = 0; largest.has(j); ++j)
      if (!go_around(args, lanes, j)) return;
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

  static PYCOLL_DEVICE bool go_around(const Args& args, Lanes& lanes, size_t iteration) {
    const int n = args.group.world_size;
    const int self = args.group.rank;
    const auto output = output_units<Element>(args.output, 0, args.chunks.numel[self]);
    RingSteps<Element, Lanes> steps(lanes, args.reduction);
    for (int step = 0; step < n; ++step) {
      const int chunk = ring::all_reduce_chunk(self, step, n);
      const auto input =
          input_units<Element>(args.input, args.chunks.begin[chunk], args.chunks.numel[chunk]);
      const Range segment = segments_of(args, chunk).segment(iteration);
      const bool is_last = step == n - 1;
      if (!steps.reduce(input, output, segment, step > 0, is_last, !is_last)) return false;
    }
    return true;
  }
};

template <class Element>
using ReduceScatterRingSimpleKernel = ReduceScatterRingKernel<Element, SimpleLanes>;
template <class Element>
using ReduceScatterRingLL128Kernel = ReduceScatterRingKernel<Element, LL128Lanes>;

}  // namespace pycoll::cuda
