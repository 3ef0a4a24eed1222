#include "kernels/cpu/tile_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c,bmi2")
#define PYCOLL_ISA_HAS_F16C

namespace pycoll::cpu::avx512 {
#include "kernels/cpu/tile_kernels.inl"

const TileKernels& table() {
  static const TileKernels kTable = make_table("avx512");
  return kTable;
}

}  // namespace pycoll::cpu::avx512

#pragma GCC pop_options
#endif
