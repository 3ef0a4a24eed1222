// Cutting a sequence of elements into nearly equal parts: pure arithmetic, usable on host and device.
#pragma once

#include <cstddef>

#if defined(__CUDACC__)
#define PYCOLL_HOST_DEVICE __host__ __device__
#else
#define PYCOLL_HOST_DEVICE
#endif

namespace pycoll {

struct Range {
  size_t begin = 0;
  size_t numel = 0;
};

// `numel` elements cut into `parts`: the first `numel % parts` parts hold one element more, so that parts differ by at most one
// and none is lost when the division leaves a rest. Parts may be empty. It is divided once, which counts on GPUs.
class Partition {
 public:
  PYCOLL_HOST_DEVICE constexpr Partition(size_t numel, size_t parts)
      : base_(numel / parts), rest_(numel % parts) {}

  PYCOLL_HOST_DEVICE constexpr Range part(size_t index) const {
    const size_t begin = index * base_ + (index < rest_ ? index : rest_);
    return Range{begin, base_ + (index < rest_ ? 1 : 0)};
  }

 private:
  size_t base_;
  size_t rest_;
};

PYCOLL_HOST_DEVICE constexpr Range part(size_t numel, size_t parts, size_t index) {
  return Partition(numel, parts).part(index);
}

PYCOLL_HOST_DEVICE constexpr size_t ceil_div(size_t numerator, size_t denominator) {
  return (numerator + denominator - 1) / denominator;
}

PYCOLL_HOST_DEVICE constexpr size_t round_up(size_t value, size_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

}  // namespace pycoll
