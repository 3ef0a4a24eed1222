// What a quantised wire makes of data, written from docs/quantisation.md and without regard to speed, and how far off it may be.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cuda/launch.h"
#include "reference.h"

namespace pycoll::sim {

struct CodeRule {
  DType dtype;
  float largest;
  double relative, absolute;  // of the error: max(relative |x|, absolute scale)

  // Of an element under a scale.
  double bound(double x, float scale) const {
    return std::fmax(relative * std::fabs(x), absolute * static_cast<double>(scale)) *
               (1 + 0x1p-21) +
           0x1p-149;
  }
};
inline constexpr CodeRule kCodeRules[] = {{DType::kFloat8E4M3FN, 448, 0x1p-4, 0x1p-10},
                                          {DType::kFloat8E5M2, 57344, 0x1p-3, 0x1p-17},
                                          {DType::kInt8, 127, 0, 0.5}};

inline const CodeRule& code_rule(DType dtype) {
  return *std::find_if(std::begin(kCodeRules), std::end(kCodeRules),
                       [dtype](const CodeRule& rule) { return rule.dtype == dtype; });
}

inline float scale_of(const CodeRule& rule, float amax) {
  if (!std::isfinite(amax)) return NAN;
  float scale = amax / rule.largest;
  if (static_cast<double>(scale) * static_cast<double>(rule.largest) > static_cast<double>(amax))
    scale = std::nextafterf(scale, 0.0f);
  return std::fmax(scale, 0x1p-126f);
}

inline uint8_t code_of(const CodeRule& rule, float x, float scale) {
  uint8_t code;
  store_float(rule.dtype, &code, std::isnan(scale) ? 0.0f : x / scale);
  return code;
}

// The largest magnitude, NaN above all.
inline float amax_of(const float* x, size_t numel) {
  float amax = 0;
  for (size_t i = 0; i < numel; ++i)
    if (std::isnan(x[i]) || std::fabs(x[i]) > amax) amax = std::fabs(x[i]);
  return amax;
}

// Elements between ranks, what they would be without rounding, and the most by which they may differ.
struct WireValues {
  std::vector<float> x;
  std::vector<double> exact, bound;

  void pass(const cuda::WireFormat& wire) {
    const CodeRule& rule = code_rule(wire.dtype);
    for (size_t begin = 0; begin < x.size(); begin += wire.block_numel) {
      const size_t end = std::min(x.size(), begin + wire.block_numel);
      const float scale = scale_of(rule, amax_of(x.data() + begin, end - begin));
      for (size_t i = begin; i < end; ++i) {
        bound[i] += rule.bound(static_cast<double>(x[i]), scale);
        const uint8_t code = code_of(rule, x[i], scale);
        x[i] = load_float(rule.dtype, &code) * scale;
      }
    }
  }
};

inline WireValues wire_values(DType dtype, const uint8_t* data, size_t numel) {
  WireValues values;
  for (size_t i = 0; i < numel; ++i) {
    values.x.push_back(load_float(dtype, data + i * itemsize(dtype)));
    values.exact.push_back(static_cast<double>(values.x.back()));
  }
  values.bound.resize(numel);
  return values;
}

// What has arrived of all ranks, combined in rank order. Bounds are those of SUM and AVG.
inline WireValues combine_on_wire(ReduceOp op, int divisor, const std::vector<WireValues>& arrived,
                                  const std::vector<double>& factors) {
  const size_t numel = arrived[0].x.size();
  std::vector<Bytes> bytes(arrived.size());
  std::vector<Term> terms;
  WireValues result;
  result.exact.resize(numel);
  result.bound.resize(numel);
  std::vector<double> magnitude(numel);
  for (size_t rank = 0; rank < arrived.size(); ++rank) {
    // Not memcpy: there may be no elements, and no memory.
    const auto* const first = reinterpret_cast<const uint8_t*>(arrived[rank].x.data());
    bytes[rank].assign(first, first + numel * sizeof(float));
    terms.push_back({&bytes[rank], factors[rank]});
    for (size_t i = 0; i < numel; ++i) {
      result.exact[i] += arrived[rank].exact[i];
      result.bound[i] += arrived[rank].bound[i];
      magnitude[i] += std::fabs(static_cast<double>(arrived[rank].x[i]));
    }
  }
  const Bytes sum = reduce_plainly(DType::kFloat32, op, divisor, terms);
  result.x.resize(numel);
  std::copy(sum.begin(), sum.end(), reinterpret_cast<uint8_t*>(result.x.data()));
  const double n = op == ReduceOp::kAvg ? divisor : 1.0;
  for (size_t i = 0; i < numel; ++i) {
    result.exact[i] /= n;
    // Each addition, and the division, rounds once.
    result.bound[i] =
        (result.bound[i] + static_cast<double>(arrived.size()) * 0x1p-24 * magnitude[i]) / n *
        (1 + 0x1p-20);
  }
  return result;
}

}  // namespace pycoll::sim
