// The part that all "direct" algorithms share: blocks through staging, one exchange a block, four slots in turn.
// docs/memory_model.md, "Rounds and staging".
#pragma once

#include "collectives/algorithm.h"

namespace pycoll {

class StagedExchange {
 public:
  static constexpr size_t kSlots = 4;

  // Each rank shows `slot_bytes` a block, `num_blocks` times.
  StagedExchange(const Context& context, size_t slot_bytes, size_t num_blocks)
      : context_(context),
        slot_bytes_(round_up(slot_bytes, 64)),
        num_blocks_(num_blocks),
        mine_(context.group.lease_staging(kSlots * slot_bytes_)),
        first_round_(context.group.rounds_posted() + 1) {}

  // write(block, slot) fills this rank's slot; read(block) uses the peers'.
  template <class Write, class Read>
  Task run(Write write, Read read) {
    Group& group = context_.group;
    show(write, 0);
    for (size_t block = 0; block < num_blocks_; ++block) {
      if (block + 1 < num_blocks_) show(write, block + 1);
      for (int r = 0; r < context_.world_size(); ++r) {
        if (r != context_.rank()) co_await context_.reached(group.round(r, first_round_ + block));
      }
      read(block);
    }
    group.post_round(Wake::kNobody);  // this rank reads no more
    group.end_staging();
  }

  const std::byte* slot_of(int rank, size_t block) const {
    const std::byte* slots =
        rank == context_.rank() ? mine_ : context_.group.staging(rank, kSlots * slot_bytes_);
    return slots + block % kSlots * slot_bytes_;
  }

 private:
  template <class Write>
  void show(Write& write, size_t block) {
    write(block, mine_ + block % kSlots * slot_bytes_);
    context_.group.post_round(Wake::kIfLast);
  }

  const Context& context_;
  const size_t slot_bytes_, num_blocks_;
  std::byte* const mine_;
  const uint64_t first_round_;
};

}  // namespace pycoll
