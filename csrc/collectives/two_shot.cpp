#include "collectives/two_shot.h"

namespace pycoll {

Range TwoShot::part_of(size_t block, size_t rank) const {
  const size_t begin = block * block_numel_;
  Range range = part_of_run(request_, std::min(block_numel_, request_.numel - begin), n_, rank);
  range.begin += begin;
  return range;
}

// All parts of the block but this rank's own, which it reads from the user's tensor; its own too if that has to be encoded, so
// that all contributions are.
void TwoShot::show_input(size_t block) {
  for (size_t r = 0; r < n_; ++r) {
    const Range range = part_of(block, r);
    if ((r == me_ && !request_.wire) || range.numel == 0) continue;
    write_run(request_, 0, range, mine_ + in_offset(block, r));
    if (r != me_) context_.count_written(request_.wire_nbytes(range.numel));
  }
}

void TwoShot::reduce_own_part(size_t block) {
  const Range range = part_of(block, me_);
  if (range.numel == 0) return;
  for (size_t r = 0; r < n_; ++r) {
    if (r != me_) sources_[r] = peer_staging(r) + in_offset(block, me_);
  }
  sources_[me_] = request_.wire ? mine_ + in_offset(block, me_) : nullptr;
  reduce_in_rank_order(context_, {0, range.begin, range.numel, range.begin}, sources_.data(),
                       mine_ + out_offset(block));
  const size_t nbytes = request_.wire_nbytes(range.numel);
  context_.count_read((n_ - 1) * nbytes);
  context_.count_written(nbytes);
}

void TwoShot::copy_result(size_t block, size_t peer) {
  const Range range = part_of(block, peer);
  if (range.numel == 0) return;
  read_run(request_, 0, range, peer_staging(peer) + out_offset(block));
  context_.count_read(request_.wire_nbytes(range.numel));
}

Task TwoShot::run(bool takes_result) {
  Group& group = context_.group;
  show_input(0);
  group.post_round(Wake::kIfLast);
  for (size_t block = 0; block <= num_blocks(); ++block) {
    const bool shows = block + 1 < num_blocks();
    if (shows) show_input(block + 1);
    // Posted for the last block too, so that all members count alike.
    group.post_round(shows ? Wake::kIfLast : Wake::kNobody);
    for (int r = 0; block > 0 && r < context_.world_size(); ++r) {
      if (r == context_.rank()) continue;
      co_await context_.reached(group.round(r, out_round(block - 1)));
      if (takes_result) copy_result(block - 1, static_cast<size_t>(r));
    }
    if (block == num_blocks()) break;
    for (int r = 0; r < context_.world_size(); ++r) {
      if (r != context_.rank()) co_await context_.reached(group.round(r, in_round(block)));
    }
    reduce_own_part(block);
    group.post_round(Wake::kIfLast);
  }
  // The round posted by the iteration block == num_blocks() came before the last reads.
  group.post_round(Wake::kNobody);
  group.end_staging();
}

}  // namespace pycoll
