// One thread that waits: first spinning, then asleep on its endpoint's bell, in slices.
#pragma once

#include <sched.h>

#include <chrono>

#include "base/clock.h"
#include "sync/bell.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pycoll {

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// The longest that a sleeper goes without looking at deadlines, peers and interrupts.
inline constexpr std::chrono::milliseconds kSleepSlice{50};

// What a waiter does before it sleeps.
struct SpinPolicy {
  int spin_us = 0;  // for how long; 0: it sleeps at once
  // Between two looks: true gives the core to whoever else can run, which is right when ranks outnumber cores (a yield
  // is several times cheaper than a sleep and a wake-up); false keeps it.
  bool yield = false;
};

// Waits until `arrived()`. Returns false when a slice has passed without: the caller then looks at deadline and peers, and calls again.
template <class Arrived>
bool wait_slice(const Arrived& arrived, Bell* bell, SpinPolicy policy, Deadline deadline) {
  if (arrived()) return true;
  if (policy.spin_us > 0) {
    const int64_t until = now_ns() + int64_t{policy.spin_us} * 1000;
    do {
      for (int i = 0; i < (policy.yield ? 1 : 32); ++i) {
        if (arrived()) return true;
        if (policy.yield) {
          sched_yield();
        } else {
          cpu_relax();
        }
      }
    } while (now_ns() < until);
  }
  bell->sleep_unless(arrived, deadline.left(kSleepSlice));
  return arrived();
}

}  // namespace pycoll
