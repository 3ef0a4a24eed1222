// Time: one monotonic clock, nanoseconds, and points in time after which a wait gives up.
#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>

namespace pycoll {

// Nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

class Deadline {
 public:
  static Deadline never() { return Deadline(INT64_MAX); }
  static Deadline after(std::chrono::milliseconds timeout) {
    const int64_t now = now_ns();
    const int64_t limit = (INT64_MAX - now) / 1'000'000;
    return timeout.count() >= limit ? never() : Deadline(now + timeout.count() * 1'000'000);
  }

  bool passed() const { return at_ns_ != INT64_MAX && now_ns() >= at_ns_; }

  // What is left, never negative, at most `most`.
  std::chrono::nanoseconds left(std::chrono::nanoseconds most) const {
    if (at_ns_ == INT64_MAX) return most;
    const int64_t rest = at_ns_ - now_ns();
    return std::chrono::nanoseconds(rest < 0 ? 0 : rest < most.count() ? rest : most.count());
  }

  static Deadline earlier(Deadline a, Deadline b) { return a.at_ns_ < b.at_ns_ ? a : b; }

 private:
  explicit Deadline(int64_t at_ns) : at_ns_(at_ns) {}
  int64_t at_ns_;
};

}  // namespace pycoll
