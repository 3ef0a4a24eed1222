// The inner loops of the CPU reductions: each works on one tile, at most kTileNumel elements that fit the first-level cache.
// They exist once per instruction set (tile_kernels_*.cpp); `tile_kernels()` picks the best one that this CPU has.
#pragma once

#include <cstddef>

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

struct TileKernels {
  const char* instruction_set;
  // Indexed by storage dtype; null where storage and accumulate type are the same. Integers widen only for AVG.
  WidenFn widen[kNumDTypes];
  NarrowFn narrow[kNumDTypes];
  // Indexed by accumulate dtype; null where the pair has no meaning.
  CombineFn combine[kNumDTypes][kNumReduceOps];
  ScaleFn scale[kNumDTypes];
  DivideFn divide[kNumDTypes];
};

const TileKernels& tile_kernels();

// Those that this CPU can run, worst first: for tests that compare them.
size_t available_tile_kernels(const TileKernels* tables[3]);

}  // namespace pycoll::cpu
