// The scale of a quantised block and the codes under it, by the rule of docs/quantisation.md. The CPU's kernels do the same
// (kernels/cpu/block_quantise), bit by bit.
#pragma once

#include <cstdint>

#include "kernels/cuda/float_io.cuh"

namespace pycoll::cuda {

// What makes the largest magnitude, given by its bits, the largest code; NaN if it is not finite.
template <class Code>
PYCOLL_DEVICE float block_scale(uint32_t amax) {
  constexpr uint32_t kLeastNormal = 0x00800000u, kInfinity = 0x7f800000u, kNan = 0x7fc00000u;
  const float scale = quotient_toward_zero(float_from_bits(amax), kLargestCode<Code>);
  const uint32_t bits = bits_from_float(scale);
  return float_from_bits(amax >= kInfinity ? kNan : bits < kLeastNormal ? kLeastNormal : bits);
}

// What is rounded to a code; 0 where the scale is NaN.
PYCOLL_DEVICE float scaled_down(float x, float scale) {
  return scale == scale ? rounded_quotient(x, scale) : 0.0f;
}

}  // namespace pycoll::cuda
