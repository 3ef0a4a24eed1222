// Buckets: many tensors in one flat array. Everything here takes any number of tensors in one call.
#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "topology/partition.h"

namespace pycoll::cpu {

// One tensor, and where it lies in the bucket.
struct BucketEntry {
  void* data =
      nullptr;  // contiguous; null: absent, which flattens to zeros and is left out when unflattened
  size_t begin = 0;  // its first element, in elements of the bucket
  size_t numel = 0;
  DType dtype = DType::kFloat32;
};

// Whether elements can be cast: float32, float16, bfloat16, float8_e4m3fn and float8_e5m2 among one another, every dtype to itself.
bool is_castable(DType from, DType to);
// Whether elements can be scaled and added: those and float64.
bool has_arithmetic(DType dtype);

struct BucketArgs {
  const BucketEntry* entries = nullptr;  // in the order of `begin`, without overlap
  size_t num_entries = 0;
  void* bucket = nullptr;
  DType dtype = DType::kFloat32;  // of the bucket
  double scale = 1.0;             // multiplies what is moved
  bool accumulate = false;        // adds to what is there instead of overwriting it
  Range range;                    // the elements of the bucket to work on
};

// Destination = cast(scale * source), or cast(destination + scale * source). Computed in float32 (float64 where both sides are) and
// rounded once, to nearest even. Without scale and accumulate a cast to the same dtype copies bits. Numbers beyond the
// range of float8 become its largest number; those beyond float16 and bfloat16 infinities, as torch's casts.
void flatten(const BucketArgs& args);
void unflatten(const BucketArgs& args);

struct QuantisedBucketArgs {
  const BucketEntry* entries = nullptr;  // without gaps, beginning at 0
  size_t num_entries = 0;
  size_t numel = 0;  // of the bucket
  void* codes = nullptr;
  DType codes_dtype = DType::kFloat8E4M3FN;
  float* scales = nullptr;
  size_t block = 0;  // elements a scale, counted through the bucket; 0: one scale a tensor
  double scale = 1.0;
  bool accumulate = false;  // unflatten only
  Range range;              // the scales, with their elements, to work on

  size_t num_scales() const { return block == 0 ? num_entries : ceil_div(numel, block); }
};

// bucket = quantised(scale * tensors), and tensors = cast(scale * dequantised(bucket)).
void flatten_quantised(const QuantisedBucketArgs& args);
void unflatten_quantised(const QuantisedBucketArgs& args);

}  // namespace pycoll::cpu
