// What the reductions mean, written from their definitions and without regard to speed: one element at a time.
#pragma once

#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "reference_floats.h"

namespace pycoll::sim {

using Bytes = std::vector<uint8_t>;

// One rank's data, and its factor.
struct Term {
  const Bytes* bytes;
  double factor;
};

namespace reference {

inline const test::Encoder& encoder(const test::FloatFormat& format) {
  static std::map<DType, std::unique_ptr<test::Encoder>> encoders;
  auto& encoder = encoders[format.dtype];
  if (!encoder) encoder = std::make_unique<test::Encoder>(format);
  return *encoder;
}

inline uint32_t code_at(const Bytes& bytes, size_t i, size_t item) {
  uint32_t code = 0;
  std::memcpy(&code, bytes.data() + i * item, item);
  return code;
}

template <class T>
T value_at(const Bytes& bytes, size_t i) {
  T x;
  std::memcpy(&x, bytes.data() + i * sizeof(T), sizeof(T));
  return x;
}

// In T, which is float or double.
template <class T>
T combine_floats(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kMin:
      return std::isnan(a) || std::isnan(b) ? std::nan("") : (b < a ? b : a);
    case ReduceOp::kMax:
      return std::isnan(a) || std::isnan(b) ? std::nan("") : (b > a ? b : a);
    default:
      return a + b;
  }
}

inline __int128 combine_integers(ReduceOp op, __int128 a, __int128 b) {
  switch (op) {
    case ReduceOp::kProduct:
      return static_cast<__int128>(static_cast<unsigned __int128>(a) *
                                   static_cast<unsigned __int128>(b));
    case ReduceOp::kMin:
      return b < a ? b : a;
    case ReduceOp::kMax:
      return b > a ? b : a;
    case ReduceOp::kBand:
      return a & b;
    case ReduceOp::kBor:
      return a | b;
    case ReduceOp::kBxor:
      return a ^ b;
    default:
      return a + b;
  }
}

inline bool combine_bools(ReduceOp op, bool a, bool b) {
  switch (op) {
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand:
      return a && b;
    case ReduceOp::kBxor:
      return a != b;
    default:
      return a || b;
  }
}

template <class T>
std::complex<T> multiply(std::complex<T> a, std::complex<T> b) {
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}

// Folds `load(term)` over the terms, in their order.
template <class Load, class Combine>
auto fold(const std::vector<Term>& terms, Load load, Combine combine) {
  auto sum = load(terms[0]);
  for (size_t i = 1; i < terms.size(); ++i) sum = combine(sum, load(terms[i]));
  return sum;
}

template <class T>
T reduce_float(ReduceOp op, int divisor, const std::vector<Term>& terms, auto load) {
  const auto scaled = [&](const Term& term) -> T {
    const T x = load(term);
    return op == ReduceOp::kPremulSum ? x * static_cast<T>(term.factor) : x;
  };
  const T sum = fold(terms, scaled, [&](T a, T b) { return combine_floats<T>(op, a, b); });
  return op == ReduceOp::kAvg ? sum / static_cast<T>(divisor) : sum;
}

// In T; `load(term)` gives a term's element.
template <class T>
std::complex<T> reduce_complex(ReduceOp op, int divisor, const std::vector<Term>& terms,
                               auto load) {
  using C = std::complex<T>;
  const auto scaled = [&](const Term& term) -> C {
    const C x = load(term);
    const auto f = static_cast<T>(op == ReduceOp::kPremulSum ? term.factor : 1.0);
    return {x.real() * f, x.imag() * f};
  };
  C sum = fold(terms, scaled,
               [&](C a, C b) { return op == ReduceOp::kProduct ? multiply(a, b) : a + b; });
  if (op == ReduceOp::kAvg)
    sum = {sum.real() / static_cast<T>(divisor), sum.imag() / static_cast<T>(divisor)};
  return sum;
}

template <class T>
void complex_element(Bytes& out, size_t i, ReduceOp op, int divisor,
                     const std::vector<Term>& terms) {
  using C = std::complex<T>;
  const C sum = reduce_complex<T>(op, divisor, terms,
                                  [i](const Term& term) { return value_at<C>(*term.bytes, i); });
  std::memcpy(out.data() + i * sizeof(C), &sum, sizeof(C));
}

// Two float16, added up in float32.
inline void complex_half_element(Bytes& out, size_t i, ReduceOp op, int divisor,
                                 const std::vector<Term>& terms) {
  const test::FloatFormat& half = *test::float_format(DType::kFloat16);
  const auto part = [&](const Term& term, size_t index) {
    return static_cast<float>(half.decode(code_at(*term.bytes, index, 2)));
  };
  const std::complex<float> sum =
      reduce_complex<float>(op, divisor, terms, [&](const Term& term) -> std::complex<float> {
        return {part(term, 2 * i), part(term, 2 * i + 1)};
      });
  const uint32_t codes[] = {encoder(half).encode(sum.real()), encoder(half).encode(sum.imag())};
  for (size_t k = 0; k < 2; ++k) std::memcpy(out.data() + (2 * i + k) * 2, &codes[k], 2);
}

template <class T>
void integer_element(Bytes& out, size_t i, ReduceOp op, int divisor,
                     const std::vector<Term>& terms) {
  __int128 sum = fold(
      terms, [&](const Term& term) -> __int128 { return value_at<T>(*term.bytes, i); },
      [&](__int128 a, __int128 b) { return combine_integers(op, a, b); });
  if (op == ReduceOp::kAvg) sum /= divisor;
  const T x = static_cast<T>(sum);
  std::memcpy(out.data() + i * sizeof(T), &x, sizeof(T));
}

inline void float_element(Bytes& out, size_t i, DType dtype, ReduceOp op, int divisor,
                          const std::vector<Term>& terms) {
  if (dtype == DType::kFloat64) {
    const auto load = [&](const Term& term) { return value_at<double>(*term.bytes, i); };
    const auto x = reduce_float<double>(op, divisor, terms, load);
    std::memcpy(out.data() + i * sizeof(x), &x, sizeof(x));
    return;
  }
  const test::FloatFormat* const format = test::float_format(dtype);
  const size_t item = itemsize(dtype);
  const auto load = [&](const Term& term) {
    return format == nullptr ? value_at<float>(*term.bytes, i)
                             : static_cast<float>(format->decode(code_at(*term.bytes, i, item)));
  };
  const auto x = reduce_float<float>(op, divisor, terms, load);
  const uint32_t code = format == nullptr ? 0 : encoder(*format).encode(x);
  std::memcpy(out.data() + i * item, format == nullptr ? static_cast<const void*>(&x) : &code,
              item);
}

inline void element(Bytes& out, size_t i, DType dtype, ReduceOp op, int divisor,
                    const std::vector<Term>& terms) {
  switch (dtype) {
    case DType::kInt8:
      return integer_element<int8_t>(out, i, op, divisor, terms);
    case DType::kInt16:
      return integer_element<int16_t>(out, i, op, divisor, terms);
    case DType::kInt32:
      return integer_element<int32_t>(out, i, op, divisor, terms);
    case DType::kInt64:
      return integer_element<int64_t>(out, i, op, divisor, terms);
    case DType::kUInt8:
      return integer_element<uint8_t>(out, i, op, divisor, terms);
    case DType::kUInt16:
      return integer_element<uint16_t>(out, i, op, divisor, terms);
    case DType::kUInt32:
      return integer_element<uint32_t>(out, i, op, divisor, terms);
    case DType::kUInt64:
      return integer_element<uint64_t>(out, i, op, divisor, terms);
    case DType::kComplex32:
      return complex_half_element(out, i, op, divisor, terms);
    case DType::kComplex64:
      return complex_element<float>(out, i, op, divisor, terms);
    case DType::kComplex128:
      return complex_element<double>(out, i, op, divisor, terms);
    case DType::kBool:
      out[i] = fold(
          terms, [&](const Term& term) { return (*term.bytes)[i] != 0; },
          [&](bool a, bool b) { return combine_bools(op, a, b); });
      return;
    default:
      return float_element(out, i, dtype, op, divisor, terms);
  }
}

}  // namespace reference

// One element of a type that takes part in float32, int8 codes too.
inline float load_float(DType dtype, const uint8_t* at) {
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, at, sizeof(x));
    return x;
  }
  if (dtype == DType::kInt8) return static_cast<float>(static_cast<int8_t>(*at));
  uint32_t code = 0;
  std::memcpy(&code, at, itemsize(dtype));
  return static_cast<float>(test::float_format(dtype)->decode(code));
}

inline void store_float(DType dtype, uint8_t* at, float x) {
  uint32_t code = 0;
  if (dtype == DType::kFloat32) {
    std::memcpy(&code, &x, sizeof(x));
  } else if (dtype == DType::kInt8) {
    code = static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(x)));
  } else {
    code = reference::encoder(*test::float_format(dtype)).encode(x);
  }
  std::memcpy(at, &code, itemsize(dtype));
}

// The terms combined in their order.
inline Bytes reduce_plainly(DType dtype, ReduceOp op, int divisor, const std::vector<Term>& terms) {
  Bytes out(terms[0].bytes->size());
  for (size_t i = 0; i < out.size() / itemsize(dtype); ++i)
    reference::element(out, i, dtype, op, divisor, terms);
  return out;
}

// Equal bits, or both NaN (of complex numbers: in the same part).
inline bool is_same_element(DType dtype, const uint8_t* a, const uint8_t* b) {
  const DTypeInfo& what = info(dtype);
  if (std::memcmp(a, b, what.itemsize) == 0) return true;
  const auto both_nan = [&]<class T>(T, size_t part) {
    T x, y;
    std::memcpy(&x, a + part * sizeof(T), sizeof(T));
    std::memcpy(&y, b + part * sizeof(T), sizeof(T));
    return (std::isnan(x) && std::isnan(y)) || std::memcmp(&x, &y, sizeof(T)) == 0;
  };
  if (const test::FloatFormat* format = test::float_format(dtype)) {
    uint32_t x = 0, y = 0;
    std::memcpy(&x, a, what.itemsize);
    std::memcpy(&y, b, what.itemsize);
    return format->is_nan(x) && format->is_nan(y);
  }
  if (dtype == DType::kComplex32)
    return is_same_element(DType::kFloat16, a, b) && is_same_element(DType::kFloat16, a + 2, b + 2);
  if (dtype == DType::kFloat64) return both_nan(0.0, 0);
  if (dtype == DType::kFloat32) return both_nan(0.0f, 0);
  if (dtype == DType::kComplex64) return both_nan(0.0f, 0) && both_nan(0.0f, 1);
  if (dtype == DType::kComplex128) return both_nan(0.0, 0) && both_nan(0.0, 1);
  return false;
}

// The first element that differs, or -1.
inline long first_difference(DType dtype, const Bytes& a, const Bytes& b) {
  const size_t item = itemsize(dtype);
  if (a.size() != b.size()) return 0;
  for (size_t i = 0; i < a.size() / item; ++i)
    if (!is_same_element(dtype, a.data() + i * item, b.data() + i * item))
      return static_cast<long>(i);
  return -1;
}

}  // namespace pycoll::sim
