// A small generator: reproducible everywhere, and fast enough to be asked at every access to memory.
#pragma once

#include <cstdint>

namespace pycoll::sim {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 0x2545F4914F6CDD1Du) {
    for (int i = 0; i < 4; ++i) next();
  }

  uint64_t next() {  // xorshift64*
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Du >> 16;
  }
  // 0 to limit - 1.
  uint64_t below(uint64_t limit) { return next() % limit; }
  bool chance(int percent) { return below(100) < static_cast<uint64_t>(percent); }

 private:
  uint64_t state_;
};

}  // namespace pycoll::sim
