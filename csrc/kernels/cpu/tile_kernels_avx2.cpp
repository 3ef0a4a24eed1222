#include "kernels/cpu/tile_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi2")
#define PYCOLL_ISA_HAS_F16C

namespace pycoll::cpu::avx2 {
#include "kernels/cpu/tile_kernels.inl"

const TileKernels& table() {
  static const TileKernels kTable = make_table("avx2");
  return kTable;
}

}  // namespace pycoll::cpu::avx2

#pragma GCC pop_options
#endif
