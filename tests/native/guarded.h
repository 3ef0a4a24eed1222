// Arrays that notice a write beyond their ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pycoll::test {

inline constexpr uint8_t kGuard = 0xA5;
inline constexpr size_t kGuardBytes = 64;

// An array between guard bytes, on the heap so that the address sanitizer sees overruns as well.
template <class T>
class Guarded {
 public:
  // `shift` elements are left free between guard and data, so that the data begins at any address that T allows.
  explicit Guarded(size_t numel, size_t shift = 0)
      : numel_(numel),
        begin_(kGuardBytes + shift * sizeof(T)),
        bytes_(begin_ + numel * sizeof(T) + kGuardBytes, kGuard) {}

  T* data() { return reinterpret_cast<T*>(bytes_.data() + begin_); }
  T& operator[](size_t i) { return data()[i]; }
  size_t numel() const { return numel_; }
  bool intact() const {
    for (size_t i = 0; i < begin_; ++i) {
      if (bytes_[i] != kGuard) return false;
    }
    for (size_t i = begin_ + numel_ * sizeof(T); i < bytes_.size(); ++i) {
      if (bytes_[i] != kGuard) return false;
    }
    return true;
  }

 private:
  size_t numel_, begin_;
  std::vector<uint8_t> bytes_;
};

}  // namespace pycoll::test
