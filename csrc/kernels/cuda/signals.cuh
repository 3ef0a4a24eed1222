// Waiting for another rank, always with an end: signals, epochs, deadlines.
//
// An epoch counts the operations of a group, modulo 2^32. It lives in device memory, so that a captured graph can be replayed: a
// kernel reads it, works in epoch + 1, and stores that when it ends.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/peer_access.cuh"

namespace pycoll::cuda {

// Whether a counter that only grows, and wraps around, has come to `expected`: right while the two are less than half its range
// apart.
PYCOLL_HOST_DEVICE constexpr bool reached(uint32_t seen, uint32_t expected) {
  return static_cast<int32_t>(seen - expected) >= 0;
}
PYCOLL_HOST_DEVICE constexpr bool reached(uint64_t seen, uint64_t expected) {
  return static_cast<int64_t>(seen - expected) >= 0;
}

PYCOLL_DEVICE bool aborted(const Watch& watch) { return peer::load_relaxed(watch.abort) != 0; }

// The first failure of a grid writes the record; all later kernels of the group return at once.
PYCOLL_DEVICE void report_failure(const Watch& watch, FailureKind kind, Phase phase, int peer,
                                  uint64_t expected, uint64_t seen) {
  if (peer::fetch_add_relaxed(watch.abort, 1u) != 0) return;
  FailureRecord* record = watch.record;
  peer::store_relaxed(&record->phase, static_cast<uint32_t>(phase));
  peer::store_relaxed(reinterpret_cast<uint32_t*>(&record->rank),
                      static_cast<uint32_t>(watch.rank));
  peer::store_relaxed(reinterpret_cast<uint32_t*>(&record->peer), static_cast<uint32_t>(peer));
  peer::store_relaxed(&record->expected, expected);
  peer::store_relaxed(&record->seen, seen);
  peer::store_release(&record->kind, static_cast<uint32_t>(kind));
}

// How a thread repeats a poll:
//
//   BoundedSpin spin(watch, phase, expected);
//   while (!reached(seen = peer::load_acquire(signal), expected)) {
//     if (!spin.again(peer, seen)) return false;
//   }
//
// again() is false when the deadline has passed, which it reports, or the grid was aborted. Clock and abort word cost much more
// than a poll that hits the cache, so only every kPollsPerLook-th call looks at them.
class BoundedSpin {
 public:
  static constexpr uint32_t kPollsPerLook = 64;

  PYCOLL_DEVICE BoundedSpin(const Watch& watch, Phase phase, uint64_t expected)
      : watch_(watch), phase_(phase), expected_(expected) {}

  PYCOLL_DEVICE bool again(int peer, uint64_t seen) {
    ++polls_;
    peer::spin_hint(polls_ >= kPollsPerLook);
    return polls_ % kPollsPerLook != 0 || look(peer, seen);
  }

 private:
  PYCOLL_DEVICE bool look(int peer, uint64_t seen) {
    if (aborted(watch_)) return false;
    if (watch_.timeout_ns == kNoTimeout) return true;
    const uint64_t now = peer::clock_ns();
    if (start_ns_ == 0) start_ns_ = now;
    if (now - start_ns_ < watch_.timeout_ns) return true;
    report_failure(watch_, FailureKind::kDeadline, phase_, peer, expected_, seen);
    return false;
  }

  const Watch& watch_;
  const Phase phase_;
  const uint64_t expected_;
  uint32_t polls_ = 0;
  uint64_t start_ns_ = 0;
};

// Until `signal`, which `peer` writes, has come to `expected`; what its writer did before is seen afterwards. False if it does
// not come.
template <class Word>
PYCOLL_DEVICE bool wait_reached(const Word* signal, Word expected, Phase phase, int peer,
                                const Watch& watch) {
  BoundedSpin spin(watch, phase, expected);
  for (;;) {
    const Word seen = peer::load_acquire(signal);
    if (reached(seen, expected)) return true;
    if (!spin.again(peer, seen)) return false;
  }
}

}  // namespace pycoll::cuda
