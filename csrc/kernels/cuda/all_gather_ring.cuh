// all_gather along a ring (ring.cuh): each rank sends its own chunk, then hands on those that come.
#pragma once

#include "kernels/cuda/ring.cuh"

namespace pycoll::cuda {

// `Part`: what all addresses and sizes of this rank are multiples of.
template <class Part, class Lanes>
struct AllGatherRingKernel {
  using Args = AllGatherRingArgs;
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
    return {ceil_div(args.chunks.numel[rank], kUnitBytes), args.staging.slot_units};
  }
  // Of the chunk that takes the most iterations.
  static PYCOLL_DEVICE BlockSegments largest_segments(const Args& args) {
    int largest = 0;
    for (int rank = 1; rank < args.group.world_size; ++rank)
      if (args.chunks.numel[rank] > args.chunks.numel[largest]) largest = rank;
    return segments_of(args, largest);
  }
  static PYCOLL_DEVICE std::byte* output_chunk(const Args& args, int rank) {
    return static_cast<std::byte*>(args.output) + args.chunks.begin[rank];
  }

  static PYCOLL_DEVICE bool go_around(const Args& args, Lanes& lanes, size_t iteration) {
    const int n = args.group.world_size;
    for (int step = 0; step < n; ++step) {
      const int chunk = ring::all_gather_chunk(args.group.rank, step, n);
      const Range segment = segments_of(args, chunk).segment(iteration);
      const size_t nbytes = args.chunks.numel[chunk];
      const Units<Part, std::byte> output(output_chunk(args, chunk), nbytes);
      const bool sends = step + 1 < n;
      if (step > 0) {
        if (!hand_on(lanes, output, segment, sends)) return false;
        continue;
      }
      const Units<Part, const std::byte> input(static_cast<const std::byte*>(args.input), nbytes);
      const bool copies = args.input != output_chunk(args, chunk);
      if (!send_own(lanes, input, output, segment, copies, sends)) return false;
    }
    return true;
  }
};

template <class Part>
using AllGatherRingSimpleKernel = AllGatherRingKernel<Part, SimpleLanes>;
template <class Part>
using AllGatherRingLL128Kernel = AllGatherRingKernel<Part, LL128Lanes>;

}  // namespace pycoll::cuda
