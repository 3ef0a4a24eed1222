// Kernels on tensors that all ranks see (mapped.h, shares.cuh). Reading a peer's memory takes a trip each way, so a thread asks for all
// ranks' units before it adds the first.
#pragma once

#include "kernels/cuda/mapped.h"
#include "kernels/cuda/shares.cuh"
#include "kernels/cuda/wire.cuh"

namespace pycoll::cuda {

template <class Element>
struct ReduceMappedKernel {
  using Args = ReduceMappedArgs;
  using Wire = PlainWire<Element>;
  static constexpr int kMaxThreads = 256;
  static constexpr int kBatch = 4;  // ranks whose units are asked for at once

  static PYCOLL_DEVICE void run(const Args& args) {
    PYCOLL_SHARED(double, factors, kMaxRanks);
    constexpr size_t kItem = sizeof(typename Element::Storage);
    run_on_shares(args, {args.reduction.factor}, factors, num_units(0, args.numel * kItem),
                  Phase::kDirectOut, [&](size_t unit) { reduce(args, factors, unit); });
  }

 private:
  static PYCOLL_DEVICE Vector16 load(const Args& args, int rank, size_t unit) {
    const void* const data = element_at<Element>(args.input.of_rank[rank], args.begin);
    return input_units<Element>(data, args.numel, 0).load(unit);
  }

  static PYCOLL_DEVICE void reduce(const Args& args, const double* factors, size_t unit) {
    const int n = args.group.world_size;
    RankOrderSum<Wire> sum(args.reduction, factors);
    for (int first = 0; first < n; first += kBatch) {
      Vector16 batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (first + i < n) batch[i] = load(args, first + i, unit);
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (first + i < n) sum.add(first + i, widen<Element>(batch[i]));
    }
    const Vector16 result = narrow<Element>(sum.result());
    for (int rank = 0; rank < n; ++rank) {
      if (args.output.of_rank[rank] == nullptr) continue;
      output_units<Element>(args.output.of_rank[rank], args.numel, 0).store(unit, result);
    }
  }
};

// `Part`: what all addresses and sizes of this rank are multiples of.
template <class Part>
struct SendMappedKernel {
  using Args = SendMappedArgs;
  static constexpr int kMaxThreads = 256;

  static PYCOLL_DEVICE void run(const Args& args) {
    const Units<Part, const std::byte> from(static_cast<const std::byte*>(args.input), args.nbytes,
                                            0);
    run_on_shares(args, {}, nullptr, num_units(0, args.nbytes), Phase::kDirectOut,
                  [&](size_t unit) {
                    const Vector16 bytes = from.load(unit);
                    for (int rank = 0; rank < args.group.world_size; ++rank) {
                      auto* const to = static_cast<std::byte*>(args.output.of_rank[rank]);
                      if (to != nullptr)
                        Units<Part, std::byte>(to, args.nbytes, 0).store(unit, bytes);
                    }
                  });
  }
};

}  // namespace pycoll::cuda
