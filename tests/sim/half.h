// What the GPU's conversions of 16-bit floats give: to the nearest, ties to even, NaN as 0x7fff.
#pragma once

#include <cstdint>
#include <cstring>

namespace pycoll::sim {

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float float_of_half(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude > 0x7c00) return float_of_bits(0x7fffffff);
  if (magnitude == 0x7c00) return float_of_bits(sign | 0x7f800000u);
  if (magnitude >= 0x0400) return float_of_bits(sign | ((magnitude << 13) + (112u << 23)));
  return float_of_bits(sign | bits_of_float(static_cast<float>(magnitude) * 0x1p-24f));
}

inline uint16_t half_of_float(float x) {
  const uint32_t bits = bits_of_float(x);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x47800000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {
    // In units of 2^-24; adding 0.5 rounds the fraction to them.
    const uint32_t rounded = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
    return static_cast<uint16_t>(sign | rounded);
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfffu + odd) >> 13));
}

inline uint16_t bfloat16_of_float(float x) {
  const uint32_t bits = bits_of_float(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace pycoll::sim
