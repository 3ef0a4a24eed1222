// all_reduce by the switch (NVLS): each rank asks for the sum of its part of all ranks' data and writes it to all at once. 2 S / n
// bytes each way for a rank, twice.
//
// multimem.ld_reduce gives the sum of what lies at one place in all ranks' memory, multimem.st writes to that place of all. Ranks
// meet before, so that all data is there, and each block tells all others afterwards that its part is done; a kernel ends when
// its blocks have heard from all, so later kernels find the results. One place is read and written by one thread of one rank.
//
// sm_90 and later; compiled for others it does nothing, and must not be chosen.
#pragma once

#include "kernels/cuda/direct.cuh"
#include "kernels/cuda/elements.cuh"

namespace pycoll::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define PYCOLL_HAS_MULTIMEM 1
#else
#define PYCOLL_HAS_MULTIMEM 0
#endif

// Of 16 bytes; sums of 16-bit floats accumulate in float32.
template <class Element>
struct Multimem;

#define PYCOLL_DEFINE_MULTIMEM(Element, add)                                                 \
  template <>                                                                                \
  struct Multimem<Element> {                                                                 \
    static PYCOLL_DEVICE Vector16 sum(const Vector16* p) {                                   \
      Vector16 v = {};                                                                       \
      if constexpr (PYCOLL_HAS_MULTIMEM)                                                     \
        asm volatile("multimem.ld_reduce.relaxed.sys.global." add " {%0, %1, %2, %3}, [%4];" \
                     : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])    \
                     : "l"(p)                                                                \
                     : "memory");                                                            \
      return v;                                                                              \
    }                                                                                        \
  }
PYCOLL_DEFINE_MULTIMEM(Float16, "add.acc::f32.v4.f16x2");
PYCOLL_DEFINE_MULTIMEM(BFloat16, "add.acc::f32.v4.bf16x2");
#undef PYCOLL_DEFINE_MULTIMEM

template <>
struct Multimem<Float32> {
  static PYCOLL_DEVICE Vector16 sum(const Vector16* p) {
    float x[4] = {};
    if constexpr (PYCOLL_HAS_MULTIMEM)
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                   : "l"(p)
                   : "memory");
    return {{bits_from_float(x[0]), bits_from_float(x[1]), bits_from_float(x[2]),
             bits_from_float(x[3])}};
  }
};

PYCOLL_DEVICE void multimem_store(Vector16* p, const Vector16& v) {
  if constexpr (PYCOLL_HAS_MULTIMEM)
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p),
                 "f"(float_from_bits(v.word[0])), "f"(float_from_bits(v.word[1])),
                 "f"(float_from_bits(v.word[2])), "f"(float_from_bits(v.word[3]))
                 : "memory");
}

template <class Element>
struct AllReduceMultimemKernel {
  using Args = AllReduceMultimemArgs;
  static constexpr int kMaxThreads = 512;
  static constexpr int kDone = 0;

  static PYCOLL_DEVICE void run(const Args& args) {
    const BlockGroup block;
    const Meeting meeting(args.group, block);
    if (!meeting.begin({}, nullptr)) return;
    const size_t num_units = args.numel / static_cast<size_t>(kElementsPerUnit<Element>);
    const Range chunk = part(num_units, static_cast<size_t>(args.group.world_size),
                             static_cast<size_t>(args.group.rank));
    Vector16* const data = static_cast<Vector16*>(args.multicast_data) + chunk.begin;
    const Share share = share_of_grid(block);
    for (size_t unit = share.first; unit < chunk.numel; unit += share.stride)
      multimem_store(data + unit, Multimem<Element>::sum(data + unit));
    const DirectLanes lanes(args.group, args.staging, block, meeting.epoch());
    lanes.post(kDone, 1, Everybody{});
    if (!lanes.wait(kDone, 1, Phase::kMultimemDone, Everybody{})) return;
    meeting.end();
  }
};

}  // namespace pycoll::cuda
