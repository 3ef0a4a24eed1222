// Reduction operators: where each has a meaning, and in which type it accumulates.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace pycoll {

enum class ReduceOp : uint8_t {
  kSum,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kBand,
  kBor,
  kBxor,
  kPremulSum,
};

inline constexpr int kNumReduceOps = static_cast<int>(ReduceOp::kPremulSum) + 1;

inline constexpr const char* name(ReduceOp op) {
  constexpr const char* kNames[kNumReduceOps] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                                 "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  return kNames[static_cast<int>(op)];
}

// Whether `op` has a meaning for `dtype`: no order among complex numbers, no bits in floats, no average of truth values.
inline constexpr bool is_valid(ReduceOp op, DType dtype) {
  const DTypeClass c = info(dtype).dtype_class;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return true;
    case ReduceOp::kAvg:
      return c != DTypeClass::kBool;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return c != DTypeClass::kComplex;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return c == DTypeClass::kInteger || c == DTypeClass::kBool;
    case ReduceOp::kPremulSum:
      return c == DTypeClass::kFloat || c == DTypeClass::kComplex;
  }
  return false;
}

// The type in which elements of `dtype` are combined. Floats below 32 bits accumulate in float32 and are rounded once; an
// average of integers needs the exact sum, which 128 bits hold for any number of ranks.
inline constexpr DType accumulate_dtype(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2FNUZ:
      return DType::kFloat32;
    case DType::kComplex32:
      return DType::kComplex64;
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
      return op == ReduceOp::kAvg ? DType::kInt128 : dtype;
    case DType::kUInt8:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
      return op == ReduceOp::kAvg ? DType::kUInt128 : dtype;
    default:
      return dtype;
  }
}

}  // namespace pycoll
