// Collectives by the switch (NVLS). multimem.ld_reduce gives the sum of what lies at one place in all ranks' memory, multimem.st writes
// to that place of all. In all_reduce a rank asks for the sum of its part and writes it to all at once; in reduce_scatter it keeps it; in
// all_gather it writes its own chunk to all. 2 S / n bytes each way for a rank, or half of that.
//
// shares.cuh says when all is there, and when it is over.
//
// sm_90 and later; compiled for others these do nothing, and the launchers refuse (multimem.cu).
#pragma once

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/shares.cuh"

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

template <class Args, class Fn>
PYCOLL_DEVICE void run_multimem(const Args& args, size_t num_units, Fn fn) {
  run_on_shares(args, {}, nullptr, num_units, Phase::kMultimemDone, fn);
}

template <class Element>
PYCOLL_DEVICE size_t whole_units(size_t numel) {
  return numel / static_cast<size_t>(kElementsPerUnit<Element>);
}

template <class Element>
struct AllReduceMultimemKernel {
  using Args = AllReduceMultimemArgs;
  static constexpr int kMaxThreads = 512;

  static PYCOLL_DEVICE void run(const Args& args) {
    const Range chunk =
        part(whole_units<Element>(args.numel), static_cast<size_t>(args.group.world_size),
             static_cast<size_t>(args.group.rank));
    Vector16* const data = static_cast<Vector16*>(args.multicast_data) + chunk.begin;
    run_multimem(args, chunk.numel, [&](size_t unit) {
      multimem_store(data + unit, Multimem<Element>::sum(data + unit));
    });
  }
};

template <class Element>
struct ReduceScatterMultimemKernel {
  using Args = ReduceScatterMultimemArgs;
  static constexpr int kMaxThreads = 512;

  static PYCOLL_DEVICE void run(const Args& args) {
    const size_t numel = whole_units<Element>(args.chunk_numel);
    const Vector16* const data = static_cast<const Vector16*>(args.multicast_data) +
                                 static_cast<size_t>(args.group.rank) * numel;
    run_multimem(args, numel, [&](size_t unit) {
      peer::store_plain(static_cast<Vector16*>(args.output) + unit,
                        Multimem<Element>::sum(data + unit));
    });
  }
};

// Of bytes.
struct AllGatherMultimemKernel {
  using Args = AllGatherMultimemArgs;
  static constexpr int kMaxThreads = 512;

  static PYCOLL_DEVICE void run(const Args& args) {
    const size_t numel = args.chunk_bytes / kUnitBytes;
    Vector16* const data =
        static_cast<Vector16*>(args.multicast_data) + static_cast<size_t>(args.group.rank) * numel;
    run_multimem(args, numel, [&](size_t unit) {
      multimem_store(data + unit,
                     peer::load_plain(static_cast<const Vector16*>(args.input) + unit));
    });
  }
};

}  // namespace pycoll::cuda
