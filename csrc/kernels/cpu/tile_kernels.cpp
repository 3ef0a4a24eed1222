#include "kernels/cpu/tile_kernels.h"

namespace pycoll::cpu {

namespace scalar {
const TileKernels& table();
}
#if defined(__x86_64__)
namespace avx2 {
const TileKernels& table();
}
namespace avx512 {
const TileKernels& table();
}
namespace avx512bf16 {
const TileKernels& table();
}
#endif

size_t available_tile_kernels(const TileKernels* tables[kMostTileKernels]) {
  size_t count = 0;
  tables[count++] = &scalar::table();
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
      __builtin_cpu_supports("bmi2")) {
    tables[count++] = &avx2::table();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      tables[count++] = &avx512::table();
      if (__builtin_cpu_supports("avx512bf16")) tables[count++] = &avx512bf16::table();
    }
  }
#endif
  return count;
}

const TileKernels& tile_kernels() {
  static const TileKernels& best = []() -> const TileKernels& {
    const TileKernels* tables[kMostTileKernels];
    return *tables[available_tile_kernels(tables) - 1];
  }();
  return best;
}

}  // namespace pycoll::cpu
