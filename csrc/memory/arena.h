// Regions of an endpoint's own segment.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/segment.h"

namespace pycoll {

struct Region {
  size_t offset = 0;
  size_t nbytes = 0;  // a multiple of the arena's grain; 0: none
};

// First fit over one free list; grows the segment when nothing fits. All methods may be called from any thread.
class Arena {
 public:
  static constexpr size_t kGrain = 4096;

  explicit Arena(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  // At least `nbytes`, contents undefined (zero where the memory is new).
  Region allocate(size_t nbytes);
  void release(Region region);

  // Gives the region back as soon as `unused()` holds, which is looked at when room is needed. `unused` may only read shared
  // memory that outlives the arena's segment.
  void release_when(Region region, std::function<bool()> unused);

  std::byte* address(Region region) const { return segment_->base() + region.offset; }
  size_t bytes_in_use() const;

 private:
  Region take_fitting(size_t nbytes);
  void put_back(Region region);
  void collect();

  struct Pending {
    Region region;
    std::function<bool()> unused;
  };

  std::shared_ptr<Segment> segment_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> nbytes, neighbours merged
  std::vector<Pending> pending_;
  size_t in_use_ = 0;
};

}  // namespace pycoll
