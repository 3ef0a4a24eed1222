// Chunks, one a rank and of any sizes, cut into blocks for staging: every block holds a strip of each chunk.
#pragma once

#include "collectives/algorithm.h"
#include "collectives/wire.h"

namespace pycoll {

struct ChunkBlocks {
  size_t block_numel;  // of one strip
  size_t stride;       // bytes from one strip to the next in a slot
  size_t num_blocks;

  // `most_numel`: of the largest chunk, the same on all ranks.
  ChunkBlocks(const Context& context, size_t most_numel) {
    const size_t n = static_cast<size_t>(context.world_size());
    block_numel = run_numel(context.request, context.group.facts().staging_bytes / n);
    stride = round_up(context.request.wire_nbytes(block_numel), 64);
    num_blocks = ceil_div(most_numel, block_numel);
  }

  // The elements of a chunk of `numel` that lie in `block`.
  Range strip(size_t block, size_t numel) const {
    const size_t begin = block * block_numel;
    return begin >= numel ? Range{} : Range{begin, std::min(block_numel, numel - begin)};
  }
};

// Beside a signal, chunks follow one another without gaps: where chunk `chunk` of `view` begins, in elements.
inline size_t packed_begin(const ChunkView& view, size_t chunk) {
  size_t begin = 0;
  for (size_t c = 0; c < chunk; ++c) begin += view.numel(c);
  return begin;
}

}  // namespace pycoll
