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

// A yield that comes back sooner than this ran nobody else. Where Linux gives each session its share of the cores (autogroups, on
// most desktops; torchrun starts each rank in a session of its own), a yield reaches the caller's session only: after a few in vain
// it is better to sleep, which lets everybody run.
inline constexpr int64_t kYieldInVainNs = 1500;
inline constexpr int kYieldsInVain = 4;

// Yields until `arrived()` (true), `until` has passed, or yielding does not help.
template <class Arrived>
bool yield_until(const Arrived& arrived, int64_t until) {
  int in_vain = 0;
  for (int64_t before = now_ns(); before < until && in_vain < kYieldsInVain;) {
    if (arrived()) return true;
    sched_yield();
    const int64_t after = now_ns();
    in_vain = after - before < kYieldInVainNs ? in_vain + 1 : 0;
    before = after;
  }
  return arrived();
}

// Keeps the core until `arrived()` (true) or `until` has passed.
template <class Arrived>
bool spin_until(const Arrived& arrived, int64_t until) {
  do {
    for (int i = 0; i < 32; ++i) {
      if (arrived()) return true;
      cpu_relax();
    }
  } while (now_ns() < until);
  return arrived();
}

// Waits until `arrived()`. Returns false when a slice has passed without: the caller then looks at deadline and peers, and calls again.
template <class Arrived>
bool wait_slice(const Arrived& arrived, Bell* bell, SpinPolicy policy, Deadline deadline) {
  if (arrived()) return true;
  if (policy.spin_us > 0) {
    const int64_t until = now_ns() + int64_t{policy.spin_us} * 1000;
    if (policy.yield ? yield_until(arrived, until) : spin_until(arrived, until)) return true;
  }
  bell->sleep_unless(arrived, deadline.left(kSleepSlice));
  return arrived();
}

}  // namespace pycoll
