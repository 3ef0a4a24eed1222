// What all_reduce and reduce share in two shots: each rank reduces one part of a block, and shows the result.
#pragma once

#include <vector>

#include "collectives/reduction.h"
#include "collectives/wire.h"

namespace pycoll {

class TwoShot {
 public:
  // docs/memory_model.md, "Rounds and staging", argues that three suffice.
  static constexpr size_t kSlots = 3;

  explicit TwoShot(const Context& context)
      : context_(context),
        request_(context.request),
        n_(static_cast<size_t>(context.world_size())),
        me_(static_cast<size_t>(context.rank())),
        block_numel_(n_ * run_numel(request_, context.group.facts().staging_bytes / n_)),
        out_bytes_(round_up(request_.wire_nbytes(block_numel_ / n_), 64)),
        in_bytes_(n_ * out_bytes_),
        staging_bytes_(kSlots * (in_bytes_ + out_bytes_)),
        first_round_(context.group.rounds_posted() + 1),
        mine_(context.group.lease_staging(staging_bytes_)),
        sources_(n_) {}

  // `takes_result`: this rank copies the parts that others reduced to its output.
  Task run(bool takes_result);

 private:
  size_t num_blocks() const { return ceil_div(request_.numel, block_numel_); }

  // Rounds in the order in which a rank posts them: in(0), then in(j + 1) and out(j) for each j.
  uint64_t in_round(size_t block) const { return first_round_ + (block == 0 ? 0 : 2 * block - 1); }
  uint64_t out_round(size_t block) const { return first_round_ + 2 * block + 2; }

  void show_input(size_t block);
  void reduce_own_part(size_t block);
  void copy_result(size_t block, size_t peer);

  Range part_of(size_t block, size_t rank) const;
  // A slot holds the block's parts, one for each rank; `rank` reduces this one.
  size_t in_offset(size_t block, size_t rank) const {
    return block % kSlots * in_bytes_ + rank * out_bytes_;
  }
  size_t out_offset(size_t block) const { return kSlots * in_bytes_ + block % kSlots * out_bytes_; }
  const std::byte* peer_staging(size_t rank) const {
    return context_.group.staging(static_cast<int>(rank), staging_bytes_);
  }

  const Context& context_;
  const Request& request_;
  const size_t n_, me_, block_numel_, out_bytes_, in_bytes_, staging_bytes_;
  const uint64_t first_round_;
  std::byte* const mine_;
  std::vector<const std::byte*> sources_;
};

}  // namespace pycoll
