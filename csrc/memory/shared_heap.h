// User tensors in an endpoint's own segment. docs/memory_model.md, "Tensors that peers reach directly".
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "memory/segment.h"

namespace pycoll {

// Blocks of whole pages, from the end of the segment down. A freed block keeps its memory and waits for the next request of its
// size class (eight classes a doubling), so that a program that makes the same tensors again and again neither enters the
// kernel nor faults. What waits is given back, oldest first, as soon as the heap holds more than it has needed of late: the peak of
// bytes in use, which is forgotten by half every second, and kSpareBytes on top. All methods may be called from any thread.
class SharedHeap {
 public:
  static constexpr size_t kPageBytes = 4096;
  static constexpr size_t kSpareBytes = size_t{64} << 20;

  explicit SharedHeap(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  // At least `nbytes`, page-aligned, contents undefined. Raises kSystem, naming bytes and remedy, and leaves everything as it was.
  std::byte* allocate(size_t nbytes);
  // `data` came from allocate(), once.
  void release(std::byte* data);

  // Whether all of [data, data + nbytes) lies in the heap.
  bool contains(const void* data, size_t nbytes) const;
  // Where in the segment `data`, which the heap contains, lies.
  size_t offset_of(const void* data) const {
    return static_cast<size_t>(static_cast<const std::byte*>(data) - segment_->base());
  }

  struct Stats {
    size_t bytes_in_use;  // in blocks that are allocated
    size_t bytes_cached;  // in freed blocks that keep their memory
    size_t num_blocks;    // allocated
  };
  Stats stats() const;
  // Gives all that waits back to the system.
  void trim();

 private:
  struct Waiting {
    size_t offset;
    uint64_t serial;  // of its release
  };

  static size_t class_bytes(size_t nbytes);
  size_t take_range(size_t nbytes);
  size_t take_backed_range(size_t bytes);
  void put_range(size_t offset, size_t nbytes);
  void trim_to(size_t most_cached);
  void note_peak();

  const std::shared_ptr<Segment> segment_;
  mutable std::mutex mutex_;
  std::unordered_map<size_t, size_t> blocks_;  // allocated: offset -> bytes
  std::unordered_map<size_t, std::deque<Waiting>>
      bins_;                          // freed, with memory: bytes -> blocks, newest last
  std::map<uint64_t, size_t> order_;  // of release: serial -> bytes
  std::map<size_t, size_t> ranges_;   // without memory: offset -> bytes, neighbours merged
  uint64_t next_serial_ = 0;
  size_t in_use_ = 0, cached_ = 0;
  size_t peak_ = 0;
  int64_t peak_ns_ = 0;
};

}  // namespace pycoll
