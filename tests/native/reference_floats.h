// What the small float formats mean, written from their definitions and without regard to speed: a code is decoded with
// ldexp, a number is encoded by looking for the nearest code in the sorted list of all of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/dtype.h"

namespace pycoll::test {

enum class Special {
  kIeee,          // the largest exponent holds infinity and NaNs
  kFinite,        // no infinity; all bits set is NaN
  kUnsignedZero,  // no infinity; the code of "minus zero" is NaN
};

struct FloatFormat {
  DType dtype;
  int bits, mantissa, bias;
  Special special;

  uint32_t sign_bit() const { return 1u << (bits - 1); }
  uint32_t num_codes() const { return 1u << bits; }

  bool is_nan(uint32_t code) const {
    const uint32_t magnitude = code & (sign_bit() - 1);
    switch (special) {
      case Special::kIeee:
        return magnitude > infinity();
      case Special::kFinite:
        return magnitude == sign_bit() - 1;
      default:
        return code == sign_bit();
    }
  }

  // Of kIeee.
  uint32_t infinity() const { return (sign_bit() - 1) >> mantissa << mantissa; }

  // The largest magnitude that is a number.
  uint32_t largest() const {
    switch (special) {
      case Special::kIeee:
        return infinity() - 1;
      case Special::kFinite:
        return sign_bit() - 2;
      default:
        return sign_bit() - 1;
    }
  }

  double decode(uint32_t code) const {
    if (is_nan(code)) return std::numeric_limits<double>::quiet_NaN();
    const uint32_t magnitude = code & (sign_bit() - 1);
    const double value = special == Special::kIeee && magnitude == infinity()
                             ? std::numeric_limits<double>::infinity()
                             : finite(magnitude);
    return (code & sign_bit()) != 0 ? -value : value;
  }

  // As if the format went on beyond its largest number, which is how rounding looks at it.
  double finite(uint32_t magnitude) const {
    const int exponent = static_cast<int>(magnitude >> mantissa);
    const auto fraction = static_cast<int>(magnitude & ((1u << mantissa) - 1));
    return exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa)
                         : std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa);
  }
};

inline constexpr FloatFormat kFloatFormats[] = {
    {DType::kFloat16, 16, 10, 15, Special::kIeee},
    {DType::kBFloat16, 16, 7, 127, Special::kIeee},
    {DType::kFloat8E4M3FN, 8, 3, 7, Special::kFinite},
    {DType::kFloat8E5M2, 8, 2, 15, Special::kIeee},
    {DType::kFloat8E4M3FNUZ, 8, 3, 8, Special::kUnsignedZero},
    {DType::kFloat8E5M2FNUZ, 8, 2, 16, Special::kUnsignedZero},
};

inline const FloatFormat* float_format(DType dtype) {
  for (const FloatFormat& format : kFloatFormats) {
    if (format.dtype == dtype) return &format;
  }
  return nullptr;
}

// Rounds to nearest, ties to the even code.
class Encoder {
 public:
  explicit Encoder(const FloatFormat& format) : format_(format) {
    for (uint32_t m = 0; m <= format.largest() + 1; ++m) magnitudes_.push_back(format.finite(m));
  }

  // Any NaN of the format stands for all of them.
  uint32_t encode(double x) const {
    const uint32_t sign = std::signbit(x) ? format_.sign_bit() : 0;
    const uint32_t nan =
        format_.special == Special::kUnsignedZero ? format_.sign_bit() : format_.sign_bit() - 1;
    if (std::isnan(x)) return nan;
    const double magnitude = std::fabs(x);
    const auto above = std::lower_bound(magnitudes_.begin(), magnitudes_.end(), magnitude);
    uint32_t code = format_.largest() + 1;
    if (above != magnitudes_.end()) {
      code = static_cast<uint32_t>(above - magnitudes_.begin());
      if (*above != magnitude) {
        const double to_above = *above - magnitude;
        const double to_below = magnitude - magnitudes_[code - 1];
        if (to_below < to_above || (to_below == to_above && code % 2 == 1)) --code;
      }
    }
    if (code > format_.largest()) {
      return format_.special == Special::kIeee ? sign | format_.infinity() : nan;
    }
    return format_.special == Special::kUnsignedZero && code == 0 ? 0 : sign | code;
  }

 private:
  const FloatFormat format_;
  std::vector<double> magnitudes_;  // of all codes without sign, and of the one after the largest
};

}  // namespace pycoll::test
