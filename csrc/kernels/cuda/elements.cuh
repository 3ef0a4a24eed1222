// Element types as kernels see them: how many share a unit of 16 bytes, in which type they accumulate, what the operators do.
//
// A kernel is instantiated once per element type; the operator is an argument, looked at once per unit and rank, which costs a
// uniform branch for 16 bytes and saves nine tenths of the instantiations.
//
// `Element` has: kDType, Storage, Accumulate, widen(Storage), narrow(Accumulate), and an Arithmetic over Accumulate.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/peer_access.cuh"
#include "kernels/cuda/small_floats.cuh"

namespace pycoll::cuda {

using Int128 = __int128;
using UInt128 = unsigned __int128;

template <class Part>
struct alignas(2 * sizeof(Part)) Complex {
  Part re, im;
};

// ---- arithmetic

template <class T>
struct FloatArithmetic {
  static PYCOLL_DEVICE T sum(T a, T b) { return a + b; }
  static PYCOLL_DEVICE T product(T a, T b) { return rounded_product(a, b); }
  // NaN when either is NaN.
  static PYCOLL_DEVICE T min(T a, T b) { return b < a || b != b ? b : a; }
  static PYCOLL_DEVICE T max(T a, T b) { return b > a || b != b ? b : a; }
  static PYCOLL_DEVICE T quotient(T a, int divisor) { return a / static_cast<T>(divisor); }
  static PYCOLL_DEVICE T scaled(T a, double factor) {
    return rounded_product(a, static_cast<T>(factor));
  }
};

template <class Part>
struct ComplexArithmetic {
  using T = Complex<Part>;
  using PartArithmetic = FloatArithmetic<Part>;
  static PYCOLL_DEVICE T sum(T a, T b) { return {a.re + b.re, a.im + b.im}; }
  static PYCOLL_DEVICE T product(T a, T b) {
    return {rounded_product(a.re, b.re) - rounded_product(a.im, b.im),
            rounded_product(a.re, b.im) + rounded_product(a.im, b.re)};
  }
  static PYCOLL_DEVICE T quotient(T a, int divisor) {
    return {PartArithmetic::quotient(a.re, divisor), PartArithmetic::quotient(a.im, divisor)};
  }
  static PYCOLL_DEVICE T scaled(T a, double factor) {
    return {PartArithmetic::scaled(a.re, factor), PartArithmetic::scaled(a.im, factor)};
  }
};

// T is signed and wide enough for the exact sum of all ranks' elements, so that AVG is exact, and MIN and MAX of unsigned
// elements are right too. Everything else wraps, as it would in the storage type; the arithmetic that may is unsigned.
template <class T, class Unsigned>
struct IntegerArithmetic {
  static PYCOLL_DEVICE Unsigned bits(T a) { return static_cast<Unsigned>(a); }
  static PYCOLL_DEVICE T sum(T a, T b) { return static_cast<T>(bits(a) + bits(b)); }
  static PYCOLL_DEVICE T product(T a, T b) { return static_cast<T>(bits(a) * bits(b)); }
  static PYCOLL_DEVICE T min(T a, T b) { return b < a ? b : a; }
  static PYCOLL_DEVICE T max(T a, T b) { return b > a ? b : a; }
  static PYCOLL_DEVICE T band(T a, T b) { return a & b; }
  static PYCOLL_DEVICE T bor(T a, T b) { return a | b; }
  static PYCOLL_DEVICE T bxor(T a, T b) { return a ^ b; }
  static PYCOLL_DEVICE T quotient(T a, int divisor) { return a / divisor; }  // toward zero
};

// Truth values, 0 or 1.
struct BoolArithmetic {
  using T = uint32_t;
  static PYCOLL_DEVICE T sum(T a, T b) { return a | b; }
  static PYCOLL_DEVICE T product(T a, T b) { return a & b; }
  static PYCOLL_DEVICE T min(T a, T b) { return a & b; }
  static PYCOLL_DEVICE T max(T a, T b) { return a | b; }
  static PYCOLL_DEVICE T band(T a, T b) { return a & b; }
  static PYCOLL_DEVICE T bor(T a, T b) { return a | b; }
  static PYCOLL_DEVICE T bxor(T a, T b) { return a ^ b; }
};

// ---- element types

template <DType kType, class T>
struct FloatElement {
  static constexpr DType kDType = kType;
  using Storage = T;
  using Accumulate = T;
  using Arithmetic = FloatArithmetic<T>;
  static PYCOLL_DEVICE T widen(T x) { return x; }
  static PYCOLL_DEVICE T narrow(T x) { return x; }
};
using Float64 = FloatElement<DType::kFloat64, double>;
using Float32 = FloatElement<DType::kFloat32, float>;

template <DType kType, class Bits>
struct SmallFloatElement {
  static constexpr DType kDType = kType;
  using Storage = Bits;
  using Accumulate = float;
  using Arithmetic = FloatArithmetic<float>;
};
struct Float16 : SmallFloatElement<DType::kFloat16, uint16_t> {
  static PYCOLL_DEVICE float widen(uint16_t bits) { return float_from_float16(bits); }
  static PYCOLL_DEVICE uint16_t narrow(float x) { return float16_from_float(x); }
};
struct BFloat16 : SmallFloatElement<DType::kBFloat16, uint16_t> {
  static PYCOLL_DEVICE float widen(uint16_t bits) { return float_from_bfloat16(bits); }
  static PYCOLL_DEVICE uint16_t narrow(float x) { return bfloat16_from_float(x); }
};
struct Float8E4M3FN : SmallFloatElement<DType::kFloat8E4M3FN, uint8_t> {
  static PYCOLL_DEVICE float widen(uint8_t code) { return Float8E4M3FNFormat::to_float(code); }
  static PYCOLL_DEVICE uint8_t narrow(float x) { return Float8E4M3FNFormat::from_float(x); }
};
struct Float8E5M2 : SmallFloatElement<DType::kFloat8E5M2, uint8_t> {
  static PYCOLL_DEVICE float widen(uint8_t code) { return Float8E5M2Format::to_float(code); }
  static PYCOLL_DEVICE uint8_t narrow(float x) { return Float8E5M2Format::from_float(x); }
};

template <DType kType, class T, class Wide, class UnsignedWide>
struct IntegerElement {
  static constexpr DType kDType = kType;
  using Storage = T;
  using Accumulate = Wide;
  using Arithmetic = IntegerArithmetic<Wide, UnsignedWide>;
  static PYCOLL_DEVICE Wide widen(T x) { return static_cast<Wide>(x); }
  static PYCOLL_DEVICE T narrow(Wide x) { return static_cast<T>(x); }
};
using Int8 = IntegerElement<DType::kInt8, int8_t, int32_t, uint32_t>;
using Int16 = IntegerElement<DType::kInt16, int16_t, int32_t, uint32_t>;
using Int32 = IntegerElement<DType::kInt32, int32_t, int64_t, uint64_t>;
using Int64 = IntegerElement<DType::kInt64, int64_t, Int128, UInt128>;
using UInt8 = IntegerElement<DType::kUInt8, uint8_t, int32_t, uint32_t>;
using UInt16 = IntegerElement<DType::kUInt16, uint16_t, int32_t, uint32_t>;
using UInt32 = IntegerElement<DType::kUInt32, uint32_t, int64_t, uint64_t>;
using UInt64 = IntegerElement<DType::kUInt64, uint64_t, Int128, UInt128>;

struct Bool {
  static constexpr DType kDType = DType::kBool;
  using Storage = uint8_t;
  using Accumulate = uint32_t;
  using Arithmetic = BoolArithmetic;
  static PYCOLL_DEVICE uint32_t widen(uint8_t x) { return x != 0 ? 1u : 0u; }
  static PYCOLL_DEVICE uint8_t narrow(uint32_t x) { return static_cast<uint8_t>(x); }
};

template <DType kType, class Part>
struct ComplexElement {
  static constexpr DType kDType = kType;
  using Storage = Complex<Part>;
  using Accumulate = Complex<Part>;
  using Arithmetic = ComplexArithmetic<Part>;
  static PYCOLL_DEVICE Accumulate widen(Storage x) { return x; }
  static PYCOLL_DEVICE Storage narrow(Accumulate x) { return x; }
};
// Of two float16.
struct Complex32 {
  static constexpr DType kDType = DType::kComplex32;
  using Storage = Complex<uint16_t>;
  using Accumulate = Complex<float>;
  using Arithmetic = ComplexArithmetic<float>;
  static PYCOLL_DEVICE Accumulate widen(Storage x) {
    return {Float16::widen(x.re), Float16::widen(x.im)};
  }
  static PYCOLL_DEVICE Storage narrow(Accumulate x) {
    return {Float16::narrow(x.re), Float16::narrow(x.im)};
  }
};
using Complex64 = ComplexElement<DType::kComplex64, float>;
using Complex128 = ComplexElement<DType::kComplex128, double>;

// ---- units: 16 bytes of elements

template <class Element>
inline constexpr int kElementsPerUnit =
    static_cast<int>(sizeof(Vector16) / sizeof(typename Element::Storage));

template <class Element, ReduceOp kOp>
inline constexpr bool kHasOp = is_valid(kOp, Element::kDType);

// The elements of one unit in the accumulate type.
template <class Element>
struct Accumulator {
  static constexpr int kNumel = kElementsPerUnit<Element>;
  typename Element::Accumulate element[kNumel];
};

template <class Element>
PYCOLL_DEVICE Accumulator<Element> widen(const Vector16& unit) {
  typename Element::Storage stored[kElementsPerUnit<Element>];
  std::memcpy(stored, &unit, sizeof(unit));
  Accumulator<Element> wide;
#pragma unroll
  for (int i = 0; i < wide.kNumel; ++i) wide.element[i] = Element::widen(stored[i]);
  return wide;
}

template <class Element>
PYCOLL_DEVICE Vector16 narrow(const Accumulator<Element>& wide) {
  typename Element::Storage stored[kElementsPerUnit<Element>];
#pragma unroll
  for (int i = 0; i < wide.kNumel; ++i) stored[i] = Element::narrow(wide.element[i]);
  Vector16 unit;
  std::memcpy(&unit, stored, sizeof(unit));
  return unit;
}

template <class Element, class Fn>
PYCOLL_DEVICE void combine_each(Accumulator<Element>& a, const Accumulator<Element>& b, Fn fn) {
#pragma unroll
  for (int i = 0; i < a.kNumel; ++i) a.element[i] = fn(a.element[i], b.element[i]);
}

// a = a op b. PREMUL_SUM takes factors that have been applied. An operator without a meaning for the type does nothing: the
// launcher refuses it.
template <class Element>
PYCOLL_DEVICE void combine(ReduceOp op, Accumulator<Element>& a, const Accumulator<Element>& b) {
  using Arithmetic = typename Element::Arithmetic;
  using T = typename Element::Accumulate;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return combine_each(a, b, [](T x, T y) { return Arithmetic::sum(x, y); });
    case ReduceOp::kProduct:
      return combine_each(a, b, [](T x, T y) { return Arithmetic::product(x, y); });
    case ReduceOp::kMin:
      if constexpr (kHasOp<Element, ReduceOp::kMin>)
        combine_each(a, b, [](T x, T y) { return Arithmetic::min(x, y); });
      return;
    case ReduceOp::kMax:
      if constexpr (kHasOp<Element, ReduceOp::kMax>)
        combine_each(a, b, [](T x, T y) { return Arithmetic::max(x, y); });
      return;
    case ReduceOp::kBand:
      if constexpr (kHasOp<Element, ReduceOp::kBand>)
        combine_each(a, b, [](T x, T y) { return Arithmetic::band(x, y); });
      return;
    case ReduceOp::kBor:
      if constexpr (kHasOp<Element, ReduceOp::kBor>)
        combine_each(a, b, [](T x, T y) { return Arithmetic::bor(x, y); });
      return;
    case ReduceOp::kBxor:
      if constexpr (kHasOp<Element, ReduceOp::kBxor>)
        combine_each(a, b, [](T x, T y) { return Arithmetic::bxor(x, y); });
      return;
  }
}

// PREMUL_SUM: every element times a rank's factor.
template <class Element>
PYCOLL_DEVICE void scale(Accumulator<Element>& a, double factor) {
  if constexpr (kHasOp<Element, ReduceOp::kPremulSum>) {
#pragma unroll
    for (int i = 0; i < a.kNumel; ++i)
      a.element[i] = Element::Arithmetic::scaled(a.element[i], factor);
  }
}

// AVG: every element of a sum divided.
template <class Element>
PYCOLL_DEVICE void divide(Accumulator<Element>& a, int divisor) {
  if constexpr (kHasOp<Element, ReduceOp::kAvg>) {
#pragma unroll
    for (int i = 0; i < a.kNumel; ++i)
      a.element[i] = Element::Arithmetic::quotient(a.element[i], divisor);
  }
}

}  // namespace pycoll::cuda
