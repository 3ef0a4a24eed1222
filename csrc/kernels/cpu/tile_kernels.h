// The inner loops of the CPU reductions: each works on one tile, about kTileNumel elements that fit the first-level cache.
// They exist once per instruction set (tile_kernels_*.cpp); `tile_kernels()` picks the best one that this CPU has.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace pycoll::cpu {

inline constexpr size_t kTileNumel = 1024;

// Storage to accumulate type, elementwise.
using WidenFn = void (*)(void* dst, const void* src, size_t numel);
// Accumulate to storage type: rounds to nearest even once; float8 without infinities overflows to NaN, as torch's does.
using NarrowFn = void (*)(void* dst, const void* src, size_t numel);
// dst = a (op) b in the accumulate type. dst may be a or b. MIN and MAX give NaN when either is NaN.
using CombineFn = void (*)(void* dst, const void* a, const void* b, size_t numel);
// x *= factor and x /= divisor in the accumulate type; integer quotients are truncated toward zero.
using ScaleFn = void (*)(void* data, double factor, size_t numel);
using DivideFn = void (*)(void* data, int divisor, size_t numel);

// The bits of the largest magnitude of float32 elements. As integers they are ordered like magnitudes, and NaN comes last.
using AmaxFn = uint32_t (*)(const void* src, size_t numel);
// codes = float32 elements / scale, rounded to nearest even; what lies beyond the largest code becomes the largest code.
using QuantiseFn = void (*)(void* codes, const void* src, float scale, size_t numel);
// dst = codes * scale in float32.
using DequantiseFn = void (*)(void* dst, const void* codes, float scale, size_t numel);

// Sums of float16 or bfloat16 elements in float32, without a detour through memory: the same additions and roundings as widening,
// combining and narrowing one after the other. Null for types that have no need of it.
struct FusedSum {
  CombineFn both = nullptr;    // storage = storage + storage
  CombineFn start = nullptr;   // float32 = storage + storage
  CombineFn add = nullptr;     // float32 = float32 + storage
  CombineFn finish = nullptr;  // storage = float32 + storage
};

struct TileKernels {
  const char* instruction_set;
  // Indexed by storage dtype; null where storage and accumulate type are the same. Integers widen only for AVG.
  WidenFn widen[kNumDTypes];
  NarrowFn narrow[kNumDTypes];
  // Indexed by accumulate dtype; null where the pair has no meaning.
  CombineFn combine[kNumDTypes][kNumReduceOps];
  FusedSum fused_sum[kNumDTypes];  // indexed by storage dtype
  ScaleFn scale[kNumDTypes];
  DivideFn divide[kNumDTypes];
  AmaxFn amax;
  // Indexed by the dtype of the codes: float8_e4m3fn, float8_e5m2, int8.
  QuantiseFn quantise[kNumDTypes];
  DequantiseFn dequantise[kNumDTypes];
  // As narrow, but a number that is too large becomes the largest one; float8_e4m3fn and float8_e5m2. Infinities stay
  // infinite where the type has them, else they become NaN.
  NarrowFn saturate[kNumDTypes];
};

const TileKernels& tile_kernels();

// Those that this CPU can run, worst first: for tests that compare them. How many.
inline constexpr size_t kMostTileKernels = 4;
size_t available_tile_kernels(const TileKernels* tables[kMostTileKernels]);

}  // namespace pycoll::cpu
