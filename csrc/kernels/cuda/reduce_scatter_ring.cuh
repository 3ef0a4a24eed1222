// reduce_scatter along a ring (ring.cuh): the first n steps of all_reduce, on chunks that the caller has cut.
#pragma once

#include "kernels/cuda/ring.cuh"

namespace pycoll::cuda {

template <class Element, class Lanes>
struct ReduceScatterRingKernel {
  using Args = ReduceScatterRingArgs;
  static constexpr int kMaxThreads = 256;

  static PYCOLL_DEVICE void run(const Args& args) {
    const TableSegments segments(args.group.world_size, args.staging.slot_units, [&](int rank) {
      return num_units(lead(args, rank), args.chunks.numel[rank] * kItem);
    });
    run_iterations<Lanes>(args, {}, nullptr, segments.largest(), [&](Lanes& lanes, size_t j) {
      return go_around(args, lanes, [&](int chunk) { return segments.segment(chunk, j); });
    });
  }

 private:
  static constexpr size_t kItem = sizeof(typename Element::Storage);

  static PYCOLL_DEVICE size_t lead(const Args& args, int rank) {
    return lead_at(args.lead_bytes, args.chunks.begin[rank] * kItem);
  }

  // All steps of one segment of each chunk.
  template <class SegmentOf>
  static PYCOLL_DEVICE bool go_around(const Args& args, Lanes& lanes, SegmentOf segment_of) {
    const int n = args.group.world_size;
    const int self = args.group.rank;
    const auto output =
        output_units<Element>(args.output, args.chunks.numel[self], lead(args, self));
    RingSteps<Element, Lanes> steps(lanes, args.reduction);
    for (int step = 0; step < n; ++step) {
      const int chunk = ring::all_reduce_chunk(self, step, n);
      const auto input =
          input_units<Element>(element_at<Element>(args.input, args.chunks.begin[chunk]),
                               args.chunks.numel[chunk], lead(args, chunk));
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
