// Memory that simulated kernels may touch, so that an access beside a buffer is found in every build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace pycoll::sim {

class BufferMap {
 public:
  void add(const void* begin, size_t nbytes) {
    const auto at = reinterpret_cast<uintptr_t>(begin);
    if (nbytes > 0) ends_[at] = at + nbytes;
    checks_ = true;
  }

  bool allows(const void* begin, size_t nbytes) const {
    if (!checks_) return true;
    const auto at = reinterpret_cast<uintptr_t>(begin);
    auto next = ends_.upper_bound(at);
    return next != ends_.begin() && at + nbytes <= (--next)->second;
  }

 private:
  std::map<uintptr_t, uintptr_t> ends_;  // of each buffer, by its beginning
  bool checks_ = false;
};

}  // namespace pycoll::sim
