// The scale of a quantised block, by the rule of bucket.h.
#pragma once

#include <cstdint>

#include "kernels/cuda/float_io.cuh"

namespace pycoll::cuda {

template <class Code>
struct CodeRange;
template <>
struct CodeRange<Float8E4M3FN> {
  static constexpr float kLargest = 448.0f;
};
template <>
struct CodeRange<Float8E5M2> {
  static constexpr float kLargest = 57344.0f;
};
template <>
struct CodeRange<Int8Code> {
  static constexpr float kLargest = 127.0f;
};

// What makes the largest magnitude, given by its bits, the largest code.
template <class Code>
PYCOLL_DEVICE float block_scale(uint32_t amax) {
  constexpr uint32_t kLeastNormal = 0x00800000u;
  if (amax == 0) return 1.0f;
  const float scale = rounded_product(float_from_bits(amax), 1.0f / CodeRange<Code>::kLargest);
  return bits_from_float(scale) < kLeastNormal ? float_from_bits(kLeastNormal) : scale;
}

}  // namespace pycoll::cuda
