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
    const TableSegments segments(args.group.world_size, args.staging.slot_units, [&](int rank) {
      return num_units(lead(args, rank), args.chunks.numel[rank]);
    });
    run_iterations<Lanes>(args, {}, nullptr, segments.largest(), [&](Lanes& lanes, size_t j) {
      return go_around(args, lanes, [&](int chunk) { return segments.segment(chunk, j); });
    });
  }

 private:
  static PYCOLL_DEVICE size_t lead(const Args& args, int rank) {
    return lead_at(args.lead_bytes, args.chunks.begin[rank]);
  }
  static PYCOLL_DEVICE std::byte* output_chunk(const Args& args, int rank) {
    return static_cast<std::byte*>(args.output) + args.chunks.begin[rank];
  }

  // All steps of one segment of each chunk.
  template <class SegmentOf>
  static PYCOLL_DEVICE bool go_around(const Args& args, Lanes& lanes, SegmentOf segment_of) {
    const int n = args.group.world_size;
    for (int step = 0; step < n; ++step) {
      const int chunk = ring::all_gather_chunk(args.group.rank, step, n);
      const Range segment = segment_of(chunk);
      const size_t nbytes = args.chunks.numel[chunk];
      const Units<Part, std::byte> output(output_chunk(args, chunk), nbytes, lead(args, chunk));
      const bool sends = step + 1 < n;
      if (step > 0) {
        if (!hand_on(lanes, output, segment, sends)) return false;
        continue;
      }
      const Units<Part, const std::byte> input(static_cast<const std::byte*>(args.input), nbytes,
                                               lead(args, chunk));
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
