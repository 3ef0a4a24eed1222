#include "kernels/cpu/wire_format.h"

#include <cstring>

namespace pycoll::cpu {
namespace {

// Where the scales of a run begin.
size_t scales_offset(size_t run_numel) { return round_up(run_numel, sizeof(float)); }

}  // namespace

void encode(const WireFormat& format, const float* tile, size_t begin, size_t numel, std::byte* run,
            size_t run_numel) {
  if (format.block == 0) {
    narrow(run + begin * itemsize(format.dtype), format.dtype, tile, numel);
    return;
  }
  auto* const scales = reinterpret_cast<float*>(run + scales_offset(run_numel));
  quantise_blocks([tile](size_t at, size_t, float*) { return tile + at; }, numel, format.block,
                  format.dtype, run + begin, scales + begin / format.block);
}

void decode(const WireFormat& format, const std::byte* run, size_t run_numel, size_t begin,
            size_t numel, float* tile) {
  if (format.block == 0) {
    widen(tile, format.dtype, run + begin * itemsize(format.dtype), numel);
    return;
  }
  const auto* const scales =
      reinterpret_cast<const float*>(run + scales_offset(run_numel)) + begin / format.block;
  const DequantiseFn dequantise = tile_kernels().dequantise[static_cast<int>(format.dtype)];
  for (size_t at = 0; at < numel; at += format.block) {
    dequantise(tile + at, run + begin + at, scales[at / format.block],
               std::min(format.block, numel - at));
  }
}

void widen(float* tile, DType dtype, const std::byte* elements, size_t numel) {
  const WidenFn widen_dtype = tile_kernels().widen[static_cast<int>(dtype)];
  if (widen_dtype == nullptr) {
    std::memcpy(tile, elements, numel * sizeof(float));
  } else {
    widen_dtype(tile, elements, numel);
  }
}

void narrow(std::byte* elements, DType dtype, const float* tile, size_t numel) {
  const NarrowFn narrow_dtype = tile_kernels().narrow[static_cast<int>(dtype)];
  if (narrow_dtype == nullptr) {
    std::memcpy(elements, tile, numel * sizeof(float));
  } else {
    narrow_dtype(elements, tile, numel);
  }
}

}  // namespace pycoll::cpu
