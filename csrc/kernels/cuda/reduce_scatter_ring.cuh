// reduce_scatter along a ring (ring.cuh): the first n steps of all_reduce, on chunks that the caller has cut.
#pragma once

#include "kernels/cuda/ring.cuh"

namespace pycoll::cuda {

template <class Element, class Lanes>
struct ReduceScatterRingKernel {
  using Args = ReduceScatterRingArgs;
  static constexpr int kMaxThreads = 256;

  static PYCOLL_DEVICE void run(const Args& args) {
    constexpr size_t kItem = sizeof(typename Element::Storage);
    const TableSegments segments(args.chunks, args.group.world_size, args.staging.slot_units,
                                 [](size_t numel) { return ceil_div(numel * kItem, kUnitBytes); });
    run_iterations<Lanes>(args, {}, nullptr, segments.largest(), [&](Lanes& lanes, size_t j) {
      return go_around(args, lanes, [&](int chunk) { return segments.segment(chunk, j); });
    });
  }

 private:
  // All steps of one segment of each chunk.
  template <class SegmentOf>
  static PYCOLL_DEVICE bool go_around(const Args& args, Lanes& lanes, SegmentOf segment_of) {
    const int n = args.group.world_size;
    const int self = args.group.rank;
    const auto output = output_units<Element>(args.output, 0, args.chunks.numel[self]);
    RingSteps<Element, Lanes> steps(lanes, args.reduction);
    for (int step = 0; step < n; ++step) {
      const int chunk = ring::all_reduce_chunk(self, step, n);
      const auto input =
          input_units<Element>(args.input, args.chunks.begin[chunk], args.chunks.numel[chunk]);
      const bool is_last = step == n - 1;
      if (!steps.reduce(input, output, segment_of(chunk), step > 0, is_last, !is_last))
        return false;
    }
    return true;
  }
};

template <class Element>
using ReduceScatterRingSimpleKernel = ReduceScatterRingKernel<Element, SimpleLanes>;
template <class Element>
using ReduceScatterRingLL128Kernel = ReduceScatterRingKernel<Element, LL128Lanes>;

}  // namespace pycoll::cuda
