// What the tests of buckets and of block-wise quantisation share: values that are hard to quantise, and conversions of one
// element at a time that do not care for speed.
#pragma once

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <random>

#include "guarded.h"
#include "kernels/cpu/block_quantise.h"
#include "reference_floats.h"
#include "topology/partition.h"

namespace pycoll::test {

inline constexpr DType kCodes[] = {DType::kFloat8E4M3FN, DType::kFloat8E5M2, DType::kInt8};

inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

// ---- the reference, one element at a time

inline float decode(DType dtype, const void* data, size_t i) {
  const auto* bytes = static_cast<const std::byte*>(data) + i * itemsize(dtype);
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, bytes, 4);
    return x;
  }
  if (dtype == DType::kInt8) return static_cast<float>(static_cast<int8_t>(*bytes));
  uint32_t code = 0;
  std::memcpy(&code, bytes, itemsize(dtype));
  return static_cast<float>(float_format(dtype)->decode(code));
}

// To nearest even; float8 saturates.
inline uint32_t encode(DType dtype, float x) {
  if (dtype == DType::kFloat32) return bits_of(x);
  if (dtype == DType::kInt8) {
    return static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(std::clamp(x, -127.f, 127.f))));
  }
  static std::vector<Encoder> encoders = [] {
    std::vector<Encoder> all;
    for (const FloatFormat& format : kFloatFormats) all.emplace_back(format);
    return all;
  }();
  const FloatFormat* format = float_format(dtype);
  const Encoder& encoder = encoders[static_cast<size_t>(format - kFloatFormats)];
  if (format->bits == 8 && std::isfinite(x)) {
    const auto most = static_cast<float>(format->finite(format->largest()));
    x = std::clamp(x, -most, most);
  }
  return encoder.encode(static_cast<double>(x));
}

inline bool same(DType dtype, uint32_t a, uint32_t b) {
  if (a == b) return true;
  if (dtype == DType::kFloat32)
    return std::isnan(std::bit_cast<float>(a)) && std::isnan(std::bit_cast<float>(b));
  return dtype != DType::kInt8 && float_format(dtype)->is_nan(a) && float_format(dtype)->is_nan(b);
}

inline uint32_t code_at(DType dtype, const void* data, size_t i) {
  uint32_t code = 0;
  std::memcpy(&code, static_cast<const std::byte*>(data) + i * itemsize(dtype), itemsize(dtype));
  return code;
}

// ---- data: depends on position, and is hard in several ways

enum class Kind { kRandom, kOutlier, kAlternating, kSubnormal, kZero, kHuge, kCount };

inline std::vector<float> make_data(Kind kind, size_t numel, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> data(numel);
  for (size_t i = 0; i < numel; ++i) {
    const float x = normal(random);
    const float sign = i % 2 == 0 ? 1.0f : -1.0f;
    switch (kind) {
      case Kind::kRandom:
        data[i] = std::ldexp(x, static_cast<int>(i % 23) - 11);
        break;
      case Kind::kOutlier:  // one element a hundred outweighs the others by 2^20
        data[i] = i % 101 == 7 ? std::ldexp(x, 20) : x;
        break;
      case Kind::kAlternating:
        data[i] = sign * (1.0f + static_cast<float>(i % 13) / 16);
        break;
      case Kind::kSubnormal:
        data[i] = sign * std::ldexp(static_cast<float>(i % 1009), -149);
        break;
      case Kind::kZero:
        data[i] = sign * 0.0f;
        break;
      default:
        data[i] = sign * (FLT_MAX - std::ldexp(static_cast<float>(i % 7), 110));
    }
  }
  return data;
}

// The most that quantisation may change x, as docs/quantisation.md states it.
inline double bound(DType dtype, double x, double scale) {
  const double slack = 1 + 0x1p-21;
  const double least = 0x1p-149;
  switch (dtype) {
    case DType::kFloat8E4M3FN:
      return std::max(std::fabs(x) / 16, scale * 0x1p-10) * slack + least;
    case DType::kFloat8E5M2:
      return std::max(std::fabs(x) / 8, scale * 0x1p-17) * slack + least;
    default:
      return scale / 2 * slack + least;
  }
}

struct Quantised {
  Guarded<uint8_t> codes;
  Guarded<float> scales;
};

inline Quantised quantise(const std::vector<float>& data, size_t block, DType dtype) {
  Quantised out{Guarded<uint8_t>(data.size(), 3), Guarded<float>(ceil_div(data.size(), block), 1)};
  cpu::quantise_blocks([&](size_t begin, size_t, float*) { return data.data() + begin; },
                       data.size(), block, dtype, out.codes.data(), out.scales.data());
  return out;
}

inline std::vector<float> dequantise(Quantised& in, size_t block, DType dtype) {
  std::vector<float> out(in.codes.numel());
  cpu::dequantise_blocks(
      [&](size_t begin, size_t numel, const float* tile) {
        std::copy_n(tile, numel, out.begin() + static_cast<ptrdiff_t>(begin));
      },
      out.size(), block, dtype, in.codes.data(), in.scales.data());
  return out;
}

}  // namespace pycoll::test
