#include "kernels/cpu/tile_kernels.h"

namespace pycoll::cpu::scalar {
#include "kernels/cpu/tile_kernels.inl"

const TileKernels& table() {
  static const TileKernels kTable = make_table("scalar");
  return kTable;
}

}  // namespace pycoll::cpu::scalar
