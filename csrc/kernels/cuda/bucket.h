// What the host knows of the kernels that pack tensors into buckets and quantise them. Plain C++; torch-free. They know no ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "kernels/cuda/launch.h"

namespace pycoll::cuda {

// ---- flatten and unflatten

enum class Direction : uint8_t { kFlatten, kUnflatten };

// A tensor and its place in the bucket, in device memory. Where the tensor's address and its place come to multiples of 16 bytes
// together, data moves in vectors from there on; elsewhere one element at a time.
struct BucketTensor {
  uint64_t data =
      0;  // its address, aligned to its element; 0: it is missing (a gradient that was not needed)
  uint64_t numel = 0;  // contiguous
  uint64_t begin = 0;  // first element in the bucket
};

struct BucketArgs {
  const BucketTensor* tensors = nullptr;  // in the order of their places, which do not overlap
  size_t num_tensors = 0;
  void* bucket = nullptr;
  size_t bucket_numel = 0;                    // to the end of the last tensor
  Direction direction = Direction::kFlatten;  // the launcher sets it
  DType tensor_dtype = DType::kFloat32;
  DType bucket_dtype = DType::kFloat32;
  double scale = 1.0;  // multiplies every element, in float32 (float64 for float64)
  // One more factor, in device memory; null for none. Of float8: what makes the largest element fit.
  const float* device_scale = nullptr;
  // target = target + scale * source instead of target = scale * source.
  bool accumulate = false;
  // float32 in device memory, at first 0, or null: the largest magnitude of all sources before they are scaled, NaN if there is
  // one. Its bits are compared as integers.
  uint32_t* amax = nullptr;

  bool moves() const {
    return scale == 1.0 && device_scale == nullptr && !accumulate && amax == nullptr &&
           tensor_dtype == bucket_dtype;
  }
};

// Elements of any dtype are moved as they are. Scaled, added and cast to one another are float32, float16, bfloat16, float8_e4m3fn and
// float8_e5m2, in float32, rounded once; and float64, in itself. Beyond the range of float8 they become its largest number, as on
// CPUs (kernels/cpu/bucket.h).

// Writes all tensors into the bucket in one launch. A missing tensor's place is filled with zeros, or left alone if `accumulate`.
// What lies between tensors is not touched.
void launch_flatten(const BucketArgs& args, LaunchConfig config, void* stream);
// The other way. Missing tensors are passed over.
void launch_unflatten(const BucketArgs& args, LaunchConfig config, void* stream);

// ---- block-wise quantisation

// `numel` elements in blocks that share a scale: of `block_numel`, the last one may be shorter; or, if `begins` is not null, block i
// is elements begins[i] to begins[i + 1]. A warp takes a block. Where data and codes come to multiples of 16 bytes together, vectors
// are used from there on.
struct QuantiseArgs {
  void* data = nullptr;  // float32, float16 or bfloat16; written by dequantise
  void* codes = nullptr;
  float* scales = nullptr;  // one a block
  size_t numel = 0;
  size_t block_numel = 128;
  DType data_dtype = DType::kFloat32;
  DType code_dtype = DType::kFloat8E4M3FN;  // float8_e4m3fn, float8_e5m2 or int8
  const uint64_t* begins = nullptr;         // num_blocks + 1 of them, in device memory
  size_t num_blocks = 0;                    // with `begins` only
};

// docs/quantisation.md states scales, codes and the bound of the error; codes and scales are those of the CPU's kernels, bit by bit.
void launch_quantise(const QuantiseArgs& args, LaunchConfig config, void* stream);
void launch_dequantise(const QuantiseArgs& args, LaunchConfig config, void* stream);

}  // namespace pycoll::cuda
