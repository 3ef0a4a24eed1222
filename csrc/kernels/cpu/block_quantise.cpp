#include "kernels/cpu/block_quantise.h"

#include <bit>
#include <limits>

namespace pycoll::cpu {

float block_scale(uint32_t amax_bits, DType codes) {
  constexpr uint32_t kInfinity = 0x7f800000;
  if (amax_bits >= kInfinity) return std::bit_cast<float>(0x7fc00000u);
  const float amax = std::bit_cast<float>(amax_bits);
  const float largest = largest_code(codes);
  float scale = amax / largest;
  // The product is exact in double, so this is rounding toward zero.
  if (static_cast<double>(scale) * static_cast<double>(largest) > static_cast<double>(amax)) {
    scale = std::bit_cast<float>(std::bit_cast<uint32_t>(scale) - 1);
  }
  return std::max(scale, std::numeric_limits<float>::min());
}

}  // namespace pycoll::cpu
