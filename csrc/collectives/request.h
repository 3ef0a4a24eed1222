// What a collective is asked to do, in terms of plain memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "kernels/cpu/wire_format.h"

namespace pycoll {

enum class Collective : uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
};

inline constexpr int kNumCollectives = static_cast<int>(Collective::kBarrier) + 1;

inline constexpr const char* name(Collective collective) {
  constexpr const char* kNames[kNumCollectives] = {"all_reduce", "all_gather", "reduce_scatter",
                                                   "broadcast",  "reduce",     "gather",
                                                   "scatter",    "all_to_all", "barrier"};
  return kNames[static_cast<int>(collective)];
}

inline constexpr bool reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter ||
         collective == Collective::kReduce;
}

inline constexpr bool has_root(Collective collective) {
  return collective == Collective::kBroadcast || collective == Collective::kReduce ||
         collective == Collective::kGather || collective == Collective::kScatter;
}

// A tensor, or a list of them, seen as chunks (one a rank, or a single one). A chunk is the concatenation of its pieces, each
// contiguous: a coalesced operation on three tensors has three pieces a chunk.
class ChunkView {
 public:
  struct Piece {
    std::byte* data;
    size_t numel;
    size_t begin;  // in the chunk
    size_t end() const { return begin + numel; }
  };

  void add_chunk() { first_piece_.push_back(pieces_.size()); }
  // Appends to the newest chunk. Empty pieces are left out.
  void add_piece(void* data, size_t numel) {
    if (numel == 0) return;
    const size_t begin = first_piece_.back() < pieces_.size() ? pieces_.back().end() : 0;
    pieces_.push_back(Piece{static_cast<std::byte*>(data), numel, begin});
  }
  void add_chunk(void* data, size_t numel) {
    add_chunk();
    add_piece(data, numel);
  }

  size_t num_chunks() const { return first_piece_.size(); }
  size_t numel(size_t chunk) const {
    return first_piece_[chunk] < end_piece(chunk) ? pieces_[end_piece(chunk) - 1].end() : 0;
  }

  // Whether the pieces of the chunk follow one another without a gap; `*data` is then where they begin (null if it is empty).
  bool is_contiguous(size_t chunk, size_t itemsize, std::byte** data) const {
    *data = nullptr;
    const std::byte* end = nullptr;
    for (size_t p = first_piece_[chunk]; p < end_piece(chunk); ++p) {
      if (end == nullptr) {
        *data = pieces_[p].data;
      } else if (pieces_[p].data != end) {
        return false;
      }
      end = pieces_[p].data + pieces_[p].numel * itemsize;
    }
    return true;
  }

  size_t num_pieces(size_t chunk) const { return end_piece(chunk) - first_piece_[chunk]; }
  // Nothing, beyond the last.
  Piece piece(size_t chunk, size_t index) const {
    return index < num_pieces(chunk) ? pieces_[first_piece_[chunk] + index] : Piece{nullptr, 0, 0};
  }
  // Of the chunk that has the most.
  size_t most_pieces() const {
    size_t most = 0;
    for (size_t chunk = 0; chunk < num_chunks(); ++chunk) most = std::max(most, num_pieces(chunk));
    return most;
  }

  size_t most_numel() const {
    size_t most = 0;
    for (size_t chunk = 0; chunk < num_chunks(); ++chunk) most = std::max(most, numel(chunk));
    return most;
  }
  size_t total_numel() const {
    size_t total = 0;
    for (const Piece& piece : pieces_) total += piece.numel;
    return total;
  }

  // fn(data, offset, numel) for each contiguous run of elements [begin, begin + numel) of the chunk; `offset` counts
  // from `begin`.
  template <class Fn>
  void for_each_run(size_t chunk, size_t begin, size_t numel, size_t itemsize, const Fn& fn) const {
    // A coalesced operation has thousands of pieces, and is cut into many runs.
    const auto last = pieces_.begin() + static_cast<ptrdiff_t>(end_piece(chunk));
    auto piece = std::partition_point(pieces_.begin() + static_cast<ptrdiff_t>(first_piece_[chunk]),
                                      last, [&](const Piece& p) { return p.end() <= begin; });
    for (size_t done = 0; piece != last && done < numel; ++piece) {
      const size_t skipped = begin + done - piece->begin;
      const size_t here = std::min(piece->numel - skipped, numel - done);
      fn(piece->data + skipped * itemsize, done, here);
      done += here;
    }
  }

  // Between the user's memory and a flat array.
  void copy_from_chunk(void* flat, size_t chunk, size_t begin, size_t numel,
                       size_t itemsize) const {
    for_each_run(chunk, begin, numel, itemsize, [&](std::byte* data, size_t offset, size_t n) {
      std::memcpy(static_cast<std::byte*>(flat) + offset * itemsize, data, n * itemsize);
    });
  }
  void copy_to_chunk(const void* flat, size_t chunk, size_t begin, size_t numel,
                     size_t itemsize) const {
    for_each_run(chunk, begin, numel, itemsize, [&](std::byte* data, size_t offset, size_t n) {
      std::memcpy(data, static_cast<const std::byte*>(flat) + offset * itemsize, n * itemsize);
    });
  }

 private:
  size_t end_piece(size_t chunk) const {
    return chunk + 1 < first_piece_.size() ? first_piece_[chunk + 1] : pieces_.size();
  }
  std::vector<size_t> first_piece_;
  std::vector<Piece> pieces_;
};

// The fields that all ranks must agree on, and this rank's memory. Chunks of `input` and `output` (r: one for each rank):
//
// | collective     | input            | output                   | numel, compared                  |
// |----------------|------------------|--------------------------|----------------------------------|
// | all_reduce     | 1                | 1, may be the input      | of the tensor                    |
// | all_gather     | 1                | r, of any sizes          | of a chunk if all are equal, else of all |
// | reduce_scatter | r, of any sizes  | 1                        | likewise                         |
// | broadcast      | 1 at the root    | 1 elsewhere              | of the tensor                    |
// | reduce         | 1                | 1 at the root            | of the tensor                    |
// | gather         | 1                | r at the root            | of a chunk                       |
// | scatter        | r at the root    | 1                        | of a chunk                       |
// | all_to_all     | r, of any sizes  | r, of any sizes          | of all; the chunks are compared instead |
struct Request {
  Collective collective = Collective::kBarrier;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  double factor = 1.0;  // PREMUL_SUM, this rank's own
  // How elements travel, if not as they are stored: of all_reduce, all_gather and reduce_scatter.
  std::optional<cpu::WireFormat> wire;
  int root = 0;
  size_t numel = 0;
  // Beyond numel: how the tensors of a coalesced or uneven operation divide it. Equal on all ranks.
  uint64_t layout_hash = 0;
  // What the caller named this call, or where it stands in the program; compared where it is not empty.
  std::string tag;
  ChunkView input, output;
  // Run by whoever executes the operation, in issue order: before its first read and after its last write of the chunks.
  std::function<void()> before, after;

  size_t itemsize() const { return pycoll::itemsize(dtype); }
  size_t nbytes() const { return numel * itemsize(); }
  // Of a run of elements between ranks.
  size_t wire_nbytes(size_t run_numel) const {
    return wire ? wire->nbytes(run_numel) : run_numel * itemsize();
  }
};

}  // namespace pycoll
