// The bell of an endpoint: where its threads sleep, and how others wake them. docs/memory_model.md, "Signals and bells".
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace pycoll {

// Lies in shared memory, zero at the start.
struct alignas(64) Bell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> sleepers;

  // After a post (sequentially consistent): wakes the threads that sleep here, if any.
  void ring_sleepers() {
    if (sleepers.load(std::memory_order_seq_cst) != 0) ring();
  }
  void ring();

  // Sleeps until somebody rings, `arrived()` holds, or `longest` is over. `arrived` is looked at once, after this thread has
  // been announced as a sleeper.
  template <class Arrived>
  void sleep_unless(const Arrived& arrived, std::chrono::nanoseconds longest) {
    const uint32_t before = rings.load(std::memory_order_acquire);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (!arrived()) wait_for_ring(before, longest);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  void wait_for_ring(uint32_t before, std::chrono::nanoseconds longest);
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace pycoll
