// How elements look between ranks where that is not how they are stored: cast to a 16-bit float, or as codes of 8 bits with a
// scale a block. docs/quantisation.md.
#pragma once

#include "kernels/cpu/block_quantise.h"
#include "topology/partition.h"

namespace pycoll::cpu {

struct WireFormat {
  DType dtype = DType::kBFloat16;
  size_t block = 0;  // elements a scale, at most kTileNumel; 0: a 16-bit float, without scales

  bool operator==(const WireFormat&) const = default;

  // Elements are encoded so many at a time, and a run of them begins at a multiple of that.
  size_t unit() const { return block == 0 ? 1 : block; }
  // Of `numel` elements: codes, padding to 4 bytes, scales.
  size_t nbytes(size_t numel) const {
    return block == 0 ? numel * itemsize(dtype)
                      : round_up(numel, sizeof(float)) + ceil_div(numel, block) * sizeof(float);
  }
};

inline constexpr bool is_wire_dtype(DType dtype) {
  return is_code_dtype(dtype) || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}
// The dtypes of tensors that can be encoded.
inline constexpr bool is_encodable(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

// How many elements encode and decode take at most: whole units.
inline size_t wire_tile_numel(const WireFormat& format) {
  return quantised_tile_numel(format.unit());
}

// Elements [begin, begin + numel) of an encoded run of `run_numel`, from and to float32; `begin` is a multiple of the unit.
void encode(const WireFormat& format, const float* tile, size_t begin, size_t numel, std::byte* run,
            size_t run_numel);
void decode(const WireFormat& format, const std::byte* run, size_t run_numel, size_t begin,
            size_t numel, float* tile);

// Between the dtype of tensors and float32; rounded to nearest even.
void widen(float* tile, DType dtype, const std::byte* elements, size_t numel);
void narrow(std::byte* elements, DType dtype, const float* tile, size_t numel);

}  // namespace pycoll::cpu
