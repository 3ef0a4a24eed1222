// Data for tests: it depends on rank, call and position, and its sums on their order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/dtype.h"
#include "random.h"
#include "reference.h"

namespace pycoll::sim {

// Floats of very different sizes, so that each order of additions has other bits; now and then infinity, NaN or minus zero.
template <class T>
T random_float(Random& random) {
  if (random.chance(3)) {
    const T specials[] = {INFINITY, -INFINITY, NAN, T(-0.0), T(0)};
    return specials[random.below(5)];
  }
  const auto fraction = static_cast<T>(random.below(1u << 20)) / T(1u << 19) - T(1);
  return std::ldexp(fraction, static_cast<int>(random.below(24)) - 12);
}

template <class T>
void fill_floats(Bytes& bytes, Random& random) {
  for (size_t i = 0; i + sizeof(T) <= bytes.size(); i += sizeof(T)) {
    const T x = random_float<T>(random);
    std::memcpy(bytes.data() + i, &x, sizeof(T));
  }
}

// How many elements are not finite: of many, so many that no block of quantised data would be.
enum class Specials { kMany, kFew };

// Of a type that takes part in float32. One element in a thousand is not finite.
inline Bytes make_mostly_finite(DType dtype, size_t numel, Random& random) {
  Bytes bytes(numel * itemsize(dtype));
  for (size_t i = 0; i < numel; ++i) {
    float x = random_float<float>(random);
    if (!std::isfinite(x) && !random.chance(3)) x = 0.0f;
    store_float(dtype, bytes.data() + i * itemsize(dtype), x);
  }
  return bytes;
}

inline Bytes make_data(DType dtype, size_t numel, int rank, int call,
                       Specials specials = Specials::kMany) {
  Random random(static_cast<uint64_t>(rank) * 1000003u + static_cast<uint64_t>(call) * 7919u + 1);
  if (specials == Specials::kFew) return make_mostly_finite(dtype, numel, random);
  Bytes bytes(numel * itemsize(dtype));
  switch (dtype) {
    case DType::kFloat64:
    case DType::kComplex128:
      fill_floats<double>(bytes, random);
      break;
    case DType::kFloat32:
    case DType::kComplex64:
      fill_floats<float>(bytes, random);
      break;
    case DType::kBool:
      for (uint8_t& x : bytes) x = random.chance(60) ? static_cast<uint8_t>(random.below(3)) : 0;
      break;
    default:  // every bit pattern has a meaning
      for (uint8_t& x : bytes) x = static_cast<uint8_t>(random.next());
  }
  return bytes;
}

}  // namespace pycoll::sim
