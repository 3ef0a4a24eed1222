// Arrays that notice a write beyond their ends.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/shared_heap.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace pycoll::test {

inline constexpr uint8_t kGuard = 0xA5;
inline constexpr size_t kGuardBytes = 64;

// Where this thread's arrays lie: null: where those of std::vector do.
inline thread_local SharedHeap* t_heap = nullptr;

template <class T>
struct HeapOrNew {
  using value_type = T;
  SharedHeap* heap = t_heap;

  HeapOrNew() = default;
  template <class U>
  HeapOrNew(const HeapOrNew<U>& other) : heap(other.heap) {}
  T* allocate(size_t numel) {
    if (heap == nullptr) return std::allocator<T>().allocate(numel);
    return reinterpret_cast<T*>(heap->allocate(numel * sizeof(T)));
  }
  void deallocate(T* data, size_t numel) {
    if (heap == nullptr) return std::allocator<T>().deallocate(data, numel);
    heap->release(reinterpret_cast<std::byte*>(data));
  }
  bool operator==(const HeapOrNew&) const = default;
};

// An array between guard bytes, which the address sanitizer takes for memory that nobody may touch.
template <class T>
class Guarded {
 public:
  // `shift` elements are left free between guard and data, so that the data begins at any address that T allows.
  explicit Guarded(size_t numel, size_t shift = 0)
      : numel_(numel),
        begin_(kGuardBytes + shift * sizeof(T)),
        bytes_(begin_ + numel * sizeof(T) + kGuardBytes, kGuard) {
    forbid_guards();
  }
  Guarded(const Guarded& other) : Guarded(other.numel_, (other.begin_ - kGuardBytes) / sizeof(T)) {
    std::copy_n(other.bytes_.begin() + static_cast<ptrdiff_t>(begin_), numel_ * sizeof(T),
                bytes_.begin() + static_cast<ptrdiff_t>(begin_));
  }
  Guarded(Guarded&&) noexcept = default;
  Guarded& operator=(const Guarded&) = delete;
  Guarded& operator=(Guarded&&) noexcept = default;
  ~Guarded() { allow_all(); }

  T* data() { return reinterpret_cast<T*>(bytes_.data() + begin_); }
  T& operator[](size_t i) { return data()[i]; }
  size_t numel() const { return numel_; }
  bool intact() const {
    allow_all();
    const auto is_guard = [](uint8_t byte) { return byte == kGuard; };
    const auto data = bytes_.begin() + static_cast<ptrdiff_t>(begin_);
    const bool result =
        std::all_of(bytes_.begin(), data, is_guard) &&
        std::all_of(data + static_cast<ptrdiff_t>(numel_ * sizeof(T)), bytes_.end(), is_guard);
    forbid_guards();
    return result;
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  void forbid_guards() const {
    const size_t end = begin_ + numel_ * sizeof(T);
    __asan_poison_memory_region(bytes_.data(), begin_);
    __asan_poison_memory_region(bytes_.data() + end, bytes_.size() - end);
  }
  void allow_all() const { __asan_unpoison_memory_region(bytes_.data(), bytes_.size()); }
#else
  void forbid_guards() const {}
  void allow_all() const {}
#endif

  size_t numel_, begin_;
  std::vector<uint8_t, HeapOrNew<uint8_t>> bytes_;
};

}  // namespace pycoll::test
