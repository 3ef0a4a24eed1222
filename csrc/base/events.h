// One record an operation: the single stream that profiler, flight recorder, timelines and benchmarks read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace pycoll {

struct Event {
  uint64_t sequence = 0;       // of the group for collectives, of the pair for sends and receives
  const char* operation = "";  // "all_reduce"
  const char* algorithm = "";  // "two_shot"
  // How peers reached the tensors: "payload" (beside the signal), "staged", "mapped", "readv"; empty: not known yet, or nothing moved.
  const char* memory_path = "";
  DType dtype = DType::kUInt8;
  DType wire_dtype = DType::kUInt8;  // how elements travelled
  ReduceOp op = ReduceOp::kSum;
  int peer = -1;      // root, source or destination; -1 where there is none
  size_t nbytes = 0;  // of the user's data on this rank
  // What this rank wrote for others, to shared memory or their own, and read from others.
  size_t bytes_written = 0;
  size_t bytes_read = 0;
  int64_t timeout_ms = 0;
  int64_t queued_ns = 0, started_ns = 0, ended_ns = 0;  // CLOCK_MONOTONIC
  bool failed = false;
};

// The last `capacity` events of a group, oldest first. Any thread may add and read.
class EventRing {
 public:
  explicit EventRing(size_t capacity) : capacity_(capacity) { events_.reserve(capacity); }

  void add(const Event& event) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (events_.size() < capacity_) {
      events_.push_back(event);
    } else {
      events_[next_] = event;
    }
    next_ = (next_ + 1) % capacity_;
  }

  std::vector<Event> snapshot() const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (events_.size() < capacity_) return events_;
    std::vector<Event> ordered(events_.begin() + static_cast<ptrdiff_t>(next_), events_.end());
    ordered.insert(ordered.end(), events_.begin(), events_.begin() + static_cast<ptrdiff_t>(next_));
    return ordered;
  }

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::vector<Event> events_;
  size_t next_ = 0;
};

}  // namespace pycoll
