// all_reduce, two shots: each rank reduces one part of the tensor and then shows the result to all.
//
// The tensor is cut into blocks, and each block into one part a rank. First shot: all ranks show their block, rank r reduces
// part r of all of them. Second shot: rank r shows the result, all copy it. Reads and writes 2 (n - 1) / n of the tensor a
// rank, the least that is possible. Part r is added up in rank order, so the fixed bracketing is kept, however the tensor is cut.
#include <vector>

#include "collectives/reduction.h"

namespace pycoll {
namespace {

constexpr size_t kSlots =
    3;  // docs/memory_model.md, "Rounds and staging", argues that three suffice

class TwoShot {
 public:
  explicit TwoShot(const Context& context)
      : context_(context),
        request_(context.request),
        n_(static_cast<size_t>(context.world_size())),
        me_(static_cast<size_t>(context.rank())),
        itemsize_(request_.itemsize()),
        block_numel_(std::max(n_, context.group.facts().staging_bytes / itemsize_)),
        in_bytes_(round_up(block_numel_ * itemsize_, 64)),
        out_bytes_(round_up(ceil_div(block_numel_, n_) * itemsize_, 64)),
        staging_bytes_(kSlots * (in_bytes_ + out_bytes_)),
        first_round_(context.group.rounds_posted() + 1),
        mine_(context.group.lease_staging(staging_bytes_)),
        sources_(n_) {}

  size_t num_blocks() const { return ceil_div(request_.numel, block_numel_); }

  // Rounds in the order in which a rank posts them: in(0), then in(j + 1) and out(j) for each j.
  uint64_t in_round(size_t block) const { return first_round_ + (block == 0 ? 0 : 2 * block - 1); }
  uint64_t out_round(size_t block) const { return first_round_ + 2 * block + 2; }

  // Shows all parts of the block but this rank's own, which it reads from the user's tensor.
  void show_input(size_t block) {
    for (size_t r = 0; r < n_; ++r) {
      const Range range = part_of(block, r);
      if (r == me_ || range.numel == 0) continue;
      const size_t in_block = (range.begin - block * block_numel_) * itemsize_;
      request_.input.copy_from_chunk(mine_ + in_offset(block) + in_block, 0, range.begin,
                                     range.numel, itemsize_);
      context_.count_written(range.numel * itemsize_);
    }
  }

  void reduce_own_part(size_t block) {
    const Range range = part_of(block, me_);
    if (range.numel == 0) return;
    const size_t in_block = (range.begin - block * block_numel_) * itemsize_;
    for (size_t r = 0; r < n_; ++r) {
      sources_[r] = r == me_ ? nullptr : peer_staging(r) + in_offset(block) + in_block;
    }
    reduce_in_rank_order(context_, {0, range.begin, range.numel, range.begin}, sources_.data(),
                         mine_ + out_offset(block));
    context_.count_read((n_ - 1) * range.numel * itemsize_);
    context_.count_written(range.numel * itemsize_);
  }

  void copy_result(size_t block, size_t peer) {
    const Range range = part_of(block, peer);
    if (range.numel == 0) return;
    request_.output.copy_to_chunk(peer_staging(peer) + out_offset(block), 0, range.begin,
                                  range.numel, itemsize_);
    context_.count_read(range.numel * itemsize_);
  }

 private:
  Range part_of(size_t block, size_t rank) const {
    const size_t begin = block * block_numel_;
    Range range = part(std::min(block_numel_, request_.numel - begin), n_, rank);
    range.begin += begin;
    return range;
  }
  size_t in_offset(size_t block) const { return block % kSlots * in_bytes_; }
  size_t out_offset(size_t block) const { return kSlots * in_bytes_ + block % kSlots * out_bytes_; }
  const std::byte* peer_staging(size_t rank) const {
    return context_.group.staging(static_cast<int>(rank), staging_bytes_);
  }

  const Context& context_;
  const Request& request_;
  const size_t n_, me_, itemsize_, block_numel_, in_bytes_, out_bytes_, staging_bytes_;
  const uint64_t first_round_;
  std::byte* const mine_;
  std::vector<const std::byte*> sources_;
};

Task run(Context context) {
  Group& group = context.group;
  TwoShot work(context);
  const size_t num_blocks = work.num_blocks();
  work.show_input(0);
  group.post_round(Wake::kIfLast);
  for (size_t block = 0; block <= num_blocks; ++block) {
    if (block + 1 < num_blocks) work.show_input(block + 1);
    // Posted for the last block too, so that all members count alike.
    group.post_round(block + 1 < num_blocks ? Wake::kIfLast : Wake::kNobody);
    for (int r = 0; block > 0 && r < context.world_size(); ++r) {
      if (r == context.rank()) continue;
      co_await context.reached(group.round(r, work.out_round(block - 1)));
      work.copy_result(block - 1, static_cast<size_t>(r));
    }
    if (block == num_blocks) break;
    for (int r = 0; r < context.world_size(); ++r) {
      if (r != context.rank()) co_await context.reached(group.round(r, work.in_round(block)));
    }
    work.reduce_own_part(block);
    group.post_round(Wake::kIfLast);
  }
  // The round posted by the iteration block == num_blocks came before the last reads.
  group.post_round(Wake::kNobody);
  group.end_staging();
}

void publish(const Context&) {}

}  // namespace

const Algorithm kAllReduceTwoShot{"two_shot", Collective::kAllReduce, publish, run};

}  // namespace pycoll
