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
    const BlockGroup block;
    const Meeting meeting(args.group, block);
    if (!meeting.begin({}, nullptr)) return;
    Lanes lanes(args.group, args.staging, block, meeting.epoch());
    constexpr size_t kItem = sizeof(typename Element::Storage);
    const Partition chunks(ceil_div(args.numel * kItem, kUnitBytes),
                           static_cast<size_t>(args.group.world_size));
    // The first chunk is the largest.
    const BlockSegments largest(chunks.part(0).numel, args.staging.slot_units);
    for (size_t j = 0; largest.has(j); ++j)
      if (!go_around(args, lanes, chunks, j)) return;
    meeting.end();
  }

 private:
  // All steps of one segment of each chunk.
  static PYCOLL_DEVICE bool go_around(const Args& args, Lanes& lanes, const Partition& chunks,
                                      size_t iteration) {
    const int n = args.group.world_size;
    const auto input = input_units<Element>(args.input, 0, args.numel);
    const auto output = output_units<Element>(args.output, 0, args.numel);
    RingSteps<Element, Lanes> steps(lanes, args.reduction);
    const int num_steps = 2 * n - 1;
    for (int step = 0; step < num_steps; ++step) {
      const Range chunk =
          chunks.part(static_cast<size_t>(ring::all_reduce_chunk(args.group.rank, step, n)));
      Range segment = BlockSegments(chunk.numel, args.staging.slot_units).segment(iteration);
      segment.begin += chunk.begin;
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
