// What the host knows of the kernels that pack tensors into buckets and quantise them. Plain C++; torch-free. They know no ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "kernels/cuda/launch.h"

namespace pycoll::cuda {

// ---- flatten and unflatten

// A tensor and its place in the bucket, in device memory. Where address and place are multiples of 16 bytes, data moves in
// vectors; elsewhere one element at a time.
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
  size_t bucket_numel = 0;  // to the end of the last tensor
  DType tensor_dtype = DType::kFloat32;
  DType bucket_dtype = DType::kFloat32;
  float scale = 1.0f;  // multiplies every element, in float32
  // One more factor, in device memory; null for none. Of float8: what makes the largest element fit.
  const float* device_scale = nullptr;
  // target = target + scale * source instead of target = scale * source.
  bool accumulate = false;
  // float32 in device memory, at first 0, or null: the largest magnitude of all sources before they are scaled, NaN if there is
  // one. Its bits are compared as integers.
  uint32_t* amax = nullptr;
};

// Pairs that there are: float32 with float32, float16, bfloat16, float8_e4m3fn, float8_e5m2; float16 and bfloat16 each with
// themselves and float32. Arithmetic is float32, rounded once; float8_e4m3fn overflows to NaN as torch's does.

// Writes all tensors into the bucket in one launch. A missing tensor's place is filled with zeros, or left alone if `accumulate`.
// What lies between tensors is not touched.
void launch_flatten(const BucketArgs& args, LaunchConfig config, void* stream);
// The other way. Missing tensors are passed over.
void launch_unflatten(const BucketArgs& args, LaunchConfig config, void* stream);

// ---- block-wise quantisation

// `numel` elements in blocks of `block_numel`, which is a multiple of 32; the last one may be shorter. Block i is stored as codes and
// one scale: x is about code * scale[i].
struct QuantiseArgs {
  void* data = nullptr;  // float32, float16 or bfloat16; written by dequantise
  void* codes = nullptr;
  float* scales = nullptr;  // one a block
  size_t numel = 0;
  size_t block_numel = 128;
  DType data_dtype = DType::kFloat32;
  DType code_dtype = DType::kFloat8E4M3FN;  // float8_e4m3fn, float8_e5m2 or int8
};

// scale = amax * (1 / L) with the largest code L: 448, 57344, 127; no less than 2^-126, and 1 if amax is 0. code = x * (1 / scale),
// rounded to nearest even. With s = max(amax / L, 2^-126), and not counting the rounding of these float32 operations (less
// than 2^-21 |x| in all), what comes back differs from x by at most
//
//   float8_e4m3fn  max(2^-4 |x|, 2^-10 s)
//   float8_e5m2    max(2^-3 |x|, 2^-17 s)
//   int8           s / 2
//
// and by the rounding to the data's type. A block with NaN or infinity comes back as NaN, all of it.
void launch_quantise(const QuantiseArgs& args, LaunchConfig config, void* stream);
void launch_dequantise(const QuantiseArgs& args, LaunchConfig config, void* stream);

}  // namespace pycoll::cuda
