// Element types and what is known of each without looking at an element.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycoll {

enum class DType : uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3FN,
  kFloat8E5M2,
  kFloat8E4M3FNUZ,
  kFloat8E5M2FNUZ,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kBool,
  kComplex32,
  kComplex64,
  kComplex128,
  // Only the accumulators of integer averages have these; no tensor does.
  kInt128,
  kUInt128,
};

inline constexpr int kNumDTypes = static_cast<int>(DType::kUInt128) + 1;

enum class DTypeClass : uint8_t { kFloat, kInteger, kBool, kComplex };

struct DTypeInfo {
  const char* name;
  size_t itemsize;  // bytes
  DTypeClass dtype_class;
};

inline constexpr DTypeInfo kDTypeInfo[kNumDTypes] = {
    {"float64", 8, DTypeClass::kFloat},
    {"float32", 4, DTypeClass::kFloat},
    {"float16", 2, DTypeClass::kFloat},
    {"bfloat16", 2, DTypeClass::kFloat},
    {"float8_e4m3fn", 1, DTypeClass::kFloat},
    {"float8_e5m2", 1, DTypeClass::kFloat},
    {"float8_e4m3fnuz", 1, DTypeClass::kFloat},
    {"float8_e5m2fnuz", 1, DTypeClass::kFloat},
    {"int8", 1, DTypeClass::kInteger},
    {"int16", 2, DTypeClass::kInteger},
    {"int32", 4, DTypeClass::kInteger},
    {"int64", 8, DTypeClass::kInteger},
    {"uint8", 1, DTypeClass::kInteger},
    {"uint16", 2, DTypeClass::kInteger},
    {"uint32", 4, DTypeClass::kInteger},
    {"uint64", 8, DTypeClass::kInteger},
    {"bool", 1, DTypeClass::kBool},
    {"complex32", 4, DTypeClass::kComplex},
    {"complex64", 8, DTypeClass::kComplex},
    {"complex128", 16, DTypeClass::kComplex},
    {"int128", 16, DTypeClass::kInteger},
    {"uint128", 16, DTypeClass::kInteger},
};

inline constexpr const DTypeInfo& info(DType dtype) { return kDTypeInfo[static_cast<int>(dtype)]; }
inline constexpr size_t itemsize(DType dtype) { return info(dtype).itemsize; }
inline constexpr const char* name(DType dtype) { return info(dtype).name; }

}  // namespace pycoll
