// Block-wise quantisation: elements in blocks that share a scale, each element a code of 8 bits. docs/quantisation.md states
// the layout, the rounding and the error bounds.
#pragma once

#include <algorithm>

#include "kernels/cpu/tile_kernels.h"

namespace pycoll::cpu {

// The dtypes that codes can have.
inline constexpr bool is_code_dtype(DType dtype) {
  return dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E5M2 || dtype == DType::kInt8;
}

// The largest magnitude that a code of this dtype stands for.
inline constexpr float largest_code(DType codes) {
  return codes == DType::kFloat8E4M3FN ? 448.0f : codes == DType::kFloat8E5M2 ? 57344.0f : 127.0f;
}

// The scale of a block, from the bits of its largest magnitude: amax / largest_code, rounded toward zero, so that no code stands for
// more than amax; at least the smallest normal float, so that all-zero and subnormal blocks need no case of their own. A
// block with a NaN or an infinity has the scale NaN.
float block_scale(uint32_t amax_bits, DType codes);

// How many elements are read or written at a time: whole blocks, as many as fit a tile; of longer blocks a tile.
inline size_t quantised_tile_numel(size_t block) {
  return block >= kTileNumel ? kTileNumel : kTileNumel / block * block;
}

// Codes and scales of `numel` elements in blocks of `block`, the last of which may be shorter. `read(begin, numel, buffer)` returns
// where float32 elements [begin, begin + numel) lie, which may be the buffer, of kTileNumel elements, that it has filled.
// Elements of blocks longer than a tile are read twice.
template <class Read>
void quantise_blocks(const Read& read, size_t numel, size_t block, DType dtype, void* codes,
                     float* scales) {
  const TileKernels& table = tile_kernels();
  const QuantiseFn quantise = table.quantise[static_cast<int>(dtype)];
  auto* const out = static_cast<uint8_t*>(codes);
  const auto write_codes = [&](size_t begin, const float* elements, size_t count, float scale) {
    if (scale == scale) {
      quantise(out + begin, elements, scale, count);
    } else {
      std::fill_n(out + begin, count, uint8_t{0});
    }
  };
  float buffer[kTileNumel];
  const size_t tile_numel = quantised_tile_numel(block);
  if (block <= kTileNumel) {
    for (size_t begin = 0; begin < numel; begin += tile_numel) {
      const size_t here = std::min(tile_numel, numel - begin);
      const float* tile = read(begin, here, buffer);
      for (size_t in_tile = 0; in_tile < here; in_tile += block) {
        const size_t count = std::min(block, here - in_tile);
        *scales = block_scale(table.amax(tile + in_tile, count), dtype);
        write_codes(begin + in_tile, tile + in_tile, count, *scales++);
      }
    }
    return;
  }
  for (size_t begin = 0; begin < numel; begin += block) {
    const size_t end = std::min(begin + block, numel);
    uint32_t amax = 0;
    for (size_t at = begin; at < end; at += tile_numel) {
      const size_t here = std::min(tile_numel, end - at);
      amax = std::max(amax, table.amax(read(at, here, buffer), here));
    }
    *scales = block_scale(amax, dtype);
    for (size_t at = begin; at < end; at += tile_numel) {
      const size_t here = std::min(tile_numel, end - at);
      write_codes(at, read(at, here, buffer), here, *scales);
    }
    ++scales;
  }
}

// The other way: `write(begin, numel, tile)` gets the float32 elements.
template <class Write>
void dequantise_blocks(const Write& write, size_t numel, size_t block, DType dtype,
                       const void* codes, const float* scales) {
  const DequantiseFn dequantise = tile_kernels().dequantise[static_cast<int>(dtype)];
  const auto* const in = static_cast<const uint8_t*>(codes);
  float tile[kTileNumel];
  const size_t tile_numel = quantised_tile_numel(block);
  size_t here = 0;
  for (size_t begin = 0; begin < numel; begin += here) {
    // A tile of a block longer than it ends where the block does.
    const size_t limit =
        block <= kTileNumel ? numel : std::min(numel, begin / block * block + block);
    here = std::min(tile_numel, limit - begin);
    for (size_t in_tile = 0; in_tile < here; in_tile += block) {
      dequantise(tile + in_tile, in + begin + in_tile, scales[(begin + in_tile) / block],
                 std::min(block, here - in_tile));
    }
    write(begin, here, static_cast<const float*>(tile));
  }
}

}  // namespace pycoll::cpu
