#include "memory/arena.h"

#include <iterator>

#include "topology/partition.h"

namespace pycoll {

Region Arena::allocate(size_t nbytes) {
  nbytes = round_up(nbytes == 0 ? 1 : nbytes, kGrain);
  std::lock_guard<std::mutex> lock(mutex_);
  Region region = take_fitting(nbytes);
  if (region.nbytes == 0) {
    collect();
    region = take_fitting(nbytes);
  }
  if (region.nbytes == 0) {
    // The last free piece is extended when it touches the end.
    const size_t end = segment_->committed();
    size_t begin = end;
    if (!free_.empty()) {
      const auto last = std::prev(free_.end());
      if (last->first + last->second == end) begin = last->first;
    }
    segment_->commit(begin + nbytes);
    if (begin != end) free_.erase(begin);
    region = Region{begin, nbytes};
  }
  in_use_ += region.nbytes;
  return region;
}

void Arena::release(Region region) {
  if (region.nbytes == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  put_back(region);
}

void Arena::release_when(Region region, std::function<bool()> unused) {
  if (region.nbytes == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.push_back(Pending{region, std::move(unused)});
}

size_t Arena::bytes_in_use() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return in_use_;
}

Region Arena::take_fitting(size_t nbytes) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < nbytes) continue;
    const Region region{it->first, nbytes};
    const size_t rest = it->second - nbytes;
    free_.erase(it);
    if (rest > 0) free_[region.offset + nbytes] = rest;
    return region;
  }
  return Region{};
}

void Arena::put_back(Region region) {
  in_use_ -= region.nbytes;
  auto next = free_.lower_bound(region.offset);
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == region.offset) {
      region = Region{previous->first, previous->second + region.nbytes};
      free_.erase(previous);
    }
  }
  if (next != free_.end() && region.offset + region.nbytes == next->first) {
    region.nbytes += next->second;
    free_.erase(next);
  }
  free_[region.offset] = region.nbytes;
}

void Arena::collect() {
  std::vector<Pending> still;
  for (Pending& pending : pending_) {
    if (pending.unused()) {
      put_back(pending.region);
    } else {
      still.push_back(std::move(pending));
    }
  }
  pending_.swap(still);
}

}  // namespace pycoll
