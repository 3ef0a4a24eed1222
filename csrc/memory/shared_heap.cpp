#include "memory/shared_heap.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "base/clock.h"
#include "base/error.h"
#include "topology/partition.h"

namespace pycoll {
namespace {

constexpr size_t kMostBlock = size_t{1} << 46;
// Blocks of this size and more begin at multiples of it (Segment::back()).
constexpr size_t kHugePage = size_t{2} << 20;
constexpr int64_t kPeakHalfLifeNs = 1'000'000'000;

}  // namespace

// Rounded up to one of eight sizes between two powers of two, at least a page apart: an eighth is wasted at most.
size_t SharedHeap::class_bytes(size_t nbytes) {
  PYCOLL_CHECK_ARG(nbytes <= kMostBlock, "a tensor of ", nbytes,
                   " bytes is larger than any address space");
  const size_t pages = std::max<size_t>(1, ceil_div(nbytes, kPageBytes));
  const size_t step = std::max<size_t>(1, std::bit_floor(pages) / 8);
  return round_up(pages, step) * kPageBytes;
}

std::byte* SharedHeap::allocate(size_t nbytes) {
  const size_t bytes = class_bytes(nbytes);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto bin = bins_.find(bytes);
  size_t offset;
  if (bin != bins_.end() && !bin->second.empty()) {
    offset = bin->second.back().offset;
    order_.erase(bin->second.back().serial);
    bin->second.pop_back();
    cached_ -= bytes;
  } else {
    offset = take_backed_range(bytes);
  }
  blocks_.emplace(offset, bytes);
  in_use_ += bytes;
  note_peak();
  return segment_->base() + offset;
}

size_t SharedHeap::take_backed_range(size_t bytes) {
  while (true) {
    const size_t offset = take_range(bytes);
    try {
      segment_->back(offset, bytes);
      return offset;
    } catch (...) {
      put_range(offset, bytes);
      if (cached_ == 0) throw;
      trim_to(0);
    }
  }
}

void SharedHeap::release(std::byte* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto block = blocks_.find(offset_of(data));
  PYCOLL_CHECK(block != blocks_.end());
  const auto [offset, bytes] = *block;
  blocks_.erase(block);
  in_use_ -= bytes;
  cached_ += bytes;
  bins_[bytes].push_back(Waiting{offset, next_serial_});
  order_.emplace(next_serial_++, bytes);
  note_peak();
  const size_t most = peak_ + kSpareBytes;
  trim_to(most > in_use_ ? most - in_use_ : 0);
}

bool SharedHeap::contains(const void* data, size_t nbytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  const std::byte* const end = segment_->base() + segment_->reserved();
  return begin >= segment_->base() + segment_->ceiling() && begin < end &&
         nbytes <= static_cast<size_t>(end - begin);
}

SharedHeap::Stats SharedHeap::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return Stats{in_use_, cached_, blocks_.size()};
}

void SharedHeap::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  trim_to(0);
}

void SharedHeap::note_peak() {
  if (in_use_ >= peak_) {
    peak_ = in_use_;
    peak_ns_ = now_ns();
    return;
  }
  const int64_t now = now_ns();
  for (; now - peak_ns_ >= kPeakHalfLifeNs && peak_ > in_use_; peak_ns_ += kPeakHalfLifeNs) {
    peak_ = std::max(in_use_, peak_ / 2);
  }
}

void SharedHeap::trim_to(size_t most_cached) {
  while (cached_ > most_cached) {
    const auto oldest = order_.begin();
    const size_t bytes = oldest->second;
    std::deque<Waiting>& bin = bins_[bytes];
    const size_t offset = bin.front().offset;
    bin.pop_front();
    order_.erase(oldest);
    cached_ -= bytes;
    segment_->give_back(offset, bytes);
    put_range(offset, bytes);
  }
}

// The smallest range without memory that fits, or a new one below all others.
size_t SharedHeap::take_range(size_t nbytes) {
  const size_t alignment = nbytes >= kHugePage ? kHugePage : kPageBytes;
  const auto fits = [&](size_t begin, size_t available) {
    const size_t skipped = round_up(begin, alignment) - begin;
    return skipped <= available && nbytes <= available - skipped;
  };
  auto best = ranges_.end();
  for (auto it = ranges_.begin(); it != ranges_.end(); ++it) {
    const bool is_smaller = best == ranges_.end() || it->second < best->second;
    if (is_smaller && fits(it->first, it->second)) best = it;
  }
  size_t begin, end, offset;
  if (best != ranges_.end()) {
    begin = best->first;
    end = begin + best->second;
    offset = round_up(begin, alignment);
    ranges_.erase(best);
  } else {
    end = segment_->ceiling();
    const size_t lowest = nbytes <= end ? (end - nbytes) / alignment * alignment : 0;
    begin = offset = segment_->lower_ceiling(nbytes <= end ? end - lowest : nbytes);
  }
  if (offset > begin) ranges_.emplace(begin, offset - begin);
  if (offset + nbytes < end) put_range(offset + nbytes, end - offset - nbytes);
  return offset;
}

void SharedHeap::put_range(size_t offset, size_t nbytes) {
  const auto next = ranges_.lower_bound(offset);
  if (next != ranges_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      nbytes += previous->second;
      ranges_.erase(previous);
    }
  }
  if (next != ranges_.end() && offset + nbytes == next->first) {
    nbytes += next->second;
    ranges_.erase(next);
  }
  ranges_[offset] = nbytes;
}

}  // namespace pycoll
