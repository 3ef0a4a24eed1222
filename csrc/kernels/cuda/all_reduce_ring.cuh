// all_reduce along a ring (ring.cuh): a reduce-scatter of n steps, then n - 1 steps that hand the results around.
//
// Input and output may be the same: a rank reads its input of a chunk in one of the first n steps and writes the chunk's result in
// that step or a later one.
#pragma once

#include "kernels/cuda/ring.cuh"

namespace pycoll::cuda {

template <class Element, class Lanes>
struct AllReduceRingKernel {
  using Args = AllReduceRingArgs;
  static constexpr int kMaxThreads = 256;

  static PYCOLL_DEVICE void run(const Args& args) {
    constexpr size_t kItem = sizeof(typename Element::Storage);
    const PartSegments segments(num_units(args.lead_bytes, args.numel * kItem),
                                args.group.world_size, args.staging.slot_units);
    run_iterations<Lanes>(args, {}, nullptr, segments.largest(), [&](Lanes& lanes, size_t j) {
      return go_around(args, lanes, [&](int chunk) { return segments.segment(chunk, j); });
    });
  }

 private:
  // All steps of one segment of each chunk.
  template <class SegmentOf>
  static PYCOLL_DEVICE bool go_around(const Args& args, Lanes& lanes, SegmentOf segment_of) {
    const int n = args.group.world_size;
    const auto input = input_units<Element>(args.input, args.numel, args.lead_bytes);
    const auto output = output_units<Element>(args.output, args.numel, args.lead_bytes);
    RingSteps<Element, Lanes> steps(lanes, args.reduction);
    const int num_steps = 2 * n - 1;
    for (int step = 0; step < num_steps; ++step) {
      const Range segment = segment_of(ring::all_reduce_chunk(args.group.rank, step, n));
      const bool sends = step + 1 < num_steps;
      const bool goes_on =
          step < n ? steps.reduce(input, output, segment, step > 0, step == n - 1, sends)
                   : hand_on(lanes, output, segment, sends);
      if (!goes_on) return false;
    }
    return true;
  }
};

template <class Element>
using AllReduceRingSimpleKernel = AllReduceRingKernel<Element, SimpleLanes>;
template <class Element>
using AllReduceRingLL128Kernel = AllReduceRingKernel<Element, LL128Lanes>;

}  // namespace pycoll::cuda
