// 8-bit floats and bfloat16, in bits, to and from float32: to the nearest, ties to even; any NaN stands for all. Instructions of
// newer GPUs are not used: they saturate where these formats, as torch and the CPU's kernels convert them, overflow.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.cuh"

namespace pycoll::cuda {

PYCOLL_DEVICE float float_from_bfloat16(uint16_t bits) {
  return float_from_bits(uint32_t{bits} << 16);
}

enum class Overflow {
  kToInfinity,
  kToNan
};  // kToNan: there is no infinity, and all bits set is NaN

template <int kMantissa, int kBias, Overflow kOverflow>
struct Float8Format {
  static constexpr uint32_t kMagnitude = 0x7f;
  static constexpr uint32_t kFraction = (1u << kMantissa) - 1;
  static constexpr uint32_t kInfinity = kMagnitude & ~kFraction;  // of formats that have one
  // What overflows becomes, and the first code that is no number.
  static constexpr uint32_t kOverflowCode = kOverflow == Overflow::kToNan ? kMagnitude : kInfinity;
  static constexpr float kLeastSubnormal = 1.0f / (1u << (kBias + kMantissa - 1));

  static PYCOLL_DEVICE float to_float(uint8_t code) {
    const uint32_t sign = uint32_t{code & 0x80u} << 24;
    const uint32_t magnitude = code & kMagnitude;
    const uint32_t exponent = magnitude >> kMantissa;
    const float subnormal = static_cast<float>(magnitude) * kLeastSubnormal;
    const uint32_t normal = (magnitude << (23 - kMantissa)) + ((127u - kBias) << 23);
    uint32_t bits = exponent == 0 ? bits_from_float(subnormal) : normal;
    if (magnitude >= kOverflowCode) bits = magnitude == kInfinity ? 0x7f800000u : 0x7fc00000u;
    return float_from_bits(bits | sign);
  }

  static PYCOLL_DEVICE uint8_t from_float(float x) {
    const uint32_t bits = bits_from_float(x);
    const uint32_t sign = (bits >> 24) & 0x80u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    constexpr uint32_t kLeastNormal = (128u - kBias) << 23;
    uint32_t code;
    if (magnitude < kLeastNormal) {
      // Adding 2^23 units leaves the fraction, rounded to nearest even, in the low bits.
      constexpr float kShift = kLeastSubnormal * (1u << 23);
      code = bits_from_float(float_from_bits(magnitude) + kShift) - bits_from_float(kShift);
    } else {
      const uint32_t odd = (magnitude >> (23 - kMantissa)) & 1;
      const uint32_t rebiased = magnitude - ((127u - kBias) << 23);
      code = (rebiased + (1u << (22 - kMantissa)) - 1 + odd) >> (23 - kMantissa);
    }
    if (code > kOverflowCode) code = kOverflowCode;
    if (magnitude > 0x7f800000u) code = kMagnitude;
    return static_cast<uint8_t>(sign | code);
  }
};

// What a number beyond the range of a format becomes where it saturates: the largest one. Infinities stay what they are.
PYCOLL_DEVICE float clamped(float x, float largest) {
  const uint32_t magnitude = bits_from_float(x) & 0x7fffffffu;
  const bool is_beyond = magnitude > bits_from_float(largest) && magnitude < 0x7f800000u;
  return is_beyond ? (x < 0 ? -largest : largest) : x;
}

using Float8E4M3FNFormat = Float8Format<3, 7, Overflow::kToNan>;
using Float8E5M2Format = Float8Format<2, 15, Overflow::kToInfinity>;

}  // namespace pycoll::cuda
