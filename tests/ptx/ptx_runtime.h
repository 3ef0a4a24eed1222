// What translated PTX (translate.py) calls: registers, memory and threads of the simulator (tests/sim).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "accesses.h"
#include "half.h"
#include "kernels/cuda/device.cuh"
#include "rendezvous.h"

namespace pycoll::sim {

inline uint32_t lane() { return static_cast<uint32_t>(this_thread().lane); }

namespace ptx {

using Int128 = __int128;
using UInt128 = unsigned __int128;

union Register {
  uint8_t u8;
  int8_t s8;
  uint16_t u16;
  int16_t s16;
  uint32_t u32;
  int32_t s32;
  uint64_t u64;
  int64_t s64;
  float f32;
  double f64;
};

inline uint64_t clock_ns() { return Scheduler::current()->clock_ns(); }

[[noreturn]] inline void fail(Verdict verdict, const std::string& text) {
  Scheduler::current()->fail(verdict, Scheduler::text_of(this_thread()) + ": " + text);
}

// Tells the simulator of polls: who goes back, and has read signals since the last time and written nothing, waits for a
// change. Others would run for ever.
class Loop {
 public:
  void polled() { has_polled_ = true; }
  void wrote() { has_written_ = true; }
  void back() {
    if (has_polled_ && !has_written_) Scheduler::current()->spin();
    has_polled_ = has_written_ = false;
  }

 private:
  bool has_polled_ = false, has_written_ = false;
};

// ---- global memory

template <class T>
T* pointer(uint64_t address, size_t n = 1) {
  if (address % (n * sizeof(T)) != 0)
    fail(Verdict::kBadAccess,
         "an access of " + std::to_string(n * sizeof(T)) + " bytes that is not aligned to them");
  return reinterpret_cast<T*>(address);
}

template <class T, size_t kNumel>
void load_plain(Loop&, uint64_t address, T (&x)[kNumel], Where where = Where::current()) {
  const T* const from = pointer<T>(address, kNumel);
  for (size_t i = 0; i < kNumel; ++i) x[i] = sim::load_plain(from + i, where);
}

template <class T, size_t kNumel>
void store_plain(Loop& loop, uint64_t address, const T (&x)[kNumel],
                 Where where = Where::current()) {
  T* const to = pointer<T>(address, kNumel);
  for (size_t i = 0; i < kNumel; ++i) sim::store_plain(to + i, x[i], where);
  loop.wrote();
}

template <class T, size_t kNumel>
void load_ordered(Loop& loop, uint64_t address, T (&x)[kNumel], Order order,
                  Where where = Where::current()) {
  const T* const from = pointer<T>(address, kNumel);
  for (size_t i = 0; i < kNumel; ++i) x[i] = load_word(from + i, order, "ordered load", where);
  loop.polled();
}

template <class T, size_t kNumel>
void store_ordered(Loop& loop, uint64_t address, const T (&x)[kNumel], Order order,
                   Where where = Where::current()) {
  T* const to = pointer<T>(address, kNumel);
  for (size_t i = 0; i < kNumel; ++i) store_word(to + i, x[i], order, "ordered store", where);
  loop.wrote();
}

// Reads the newest value and replaces it in one step; what does not change it and releases nothing is a poll.
template <class T, class Update>
T update(Loop& loop, uint64_t address, Order order, Update change, Where where = Where::current()) {
  T* const p = pointer<T>(address);
  Scheduler& scheduler = *Scheduler::current();
  scheduler.before_access("atomic", p, sizeof(T), where);
  // Fibers do not interrupt one another from here on.
  const T before = scheduler.is_weak()        ? static_cast<T>(weak_newest(p, sizeof(T), order))
                   : order == Order::kAcquire ? __atomic_load_n(p, __ATOMIC_ACQUIRE)
                                              : __atomic_load_n(p, __ATOMIC_RELAXED);
  const T after = change(before);
  if (after == before && order != Order::kRelease) {
    scheduler.note_poll(p);
    loop.polled();
    return before;
  }
  if (scheduler.is_weak()) {
    weak_store(p, after, sizeof(T), order);
  } else {
    __atomic_store_n(p, after, order == Order::kRelease ? __ATOMIC_RELEASE : __ATOMIC_RELAXED);
  }
  scheduler.note_store(p, sizeof(T));
  loop.wrote();
  return before;
}

template <class T, size_t kNumel>
void load_parameter(const std::byte* from, T (&x)[kNumel]) {
  std::memcpy(x, from, sizeof(x));
}

// ---- shared memory of a block: plain, as in the simulator's own kernels

class SharedMemory {
 public:
  explicit SharedMemory(size_t nbytes)
      : nbytes_(nbytes),
        data_(nbytes == 0 ? nullptr : static_cast<std::byte*>(meet::shared_array("ptx", nbytes))) {}

  template <class T, size_t kNumel>
  void load(uint64_t address, T (&x)[kNumel]) const {
    const T* const from = at<T>(address, kNumel);
    for (size_t i = 0; i < kNumel; ++i) x[i] = from[i];
  }
  template <class T, size_t kNumel>
  void store(uint64_t address, const T (&x)[kNumel]) const {
    T* const to = at<T>(address, kNumel);
    for (size_t i = 0; i < kNumel; ++i) to[i] = x[i];
  }
  template <class T>
  T* at(uint64_t address, size_t n) const {
    if (address % (n * sizeof(T)) != 0 || address + n * sizeof(T) > nbytes_)
      fail(Verdict::kBadAccess, "shared memory has " + std::to_string(nbytes_) + " bytes, and " +
                                    std::to_string(n * sizeof(T)) + " are accessed at " +
                                    std::to_string(address));
    return reinterpret_cast<T*>(data_ + address);
  }

 private:
  size_t nbytes_;
  std::byte* data_;
};

// Lane 8 i + r gives the address of row r of matrix i. A lane has two neighbouring elements of a row, or, transposed, of a column.
struct MatrixElement {
  uint64_t address;
  size_t column;
};
inline MatrixElement matrix_element(uint64_t address, size_t matrix, uint32_t part,
                                    bool transposed) {
  const uint32_t row = transposed ? 2 * (lane() % 4) + part : lane() / 4;
  const uint32_t column = transposed ? lane() / 4 : 2 * (lane() % 4) + part;
  const auto source = static_cast<int>(8 * matrix + row);
  return {meet::shuffle(~0u, address, source), column};
}
template <size_t kNumel>
void load_matrices(const SharedMemory& shared, uint64_t address, uint32_t (&x)[kNumel],
                   bool transposed) {
  for (size_t i = 0; i < kNumel; ++i) {
    x[i] = 0;
    for (uint32_t part = 0; part < 2; ++part) {
      const MatrixElement element = matrix_element(address, i, part, transposed);
      x[i] |= uint32_t{*shared.at<uint16_t>(element.address + 2 * element.column, 1)}
              << (16 * part);
    }
  }
}
template <size_t kNumel>
void store_matrices(const SharedMemory& shared, uint64_t address, const uint32_t (&x)[kNumel],
                    bool transposed) {
  for (size_t i = 0; i < kNumel; ++i) {
    for (uint32_t part = 0; part < 2; ++part) {
      const MatrixElement element = matrix_element(address, i, part, transposed);
      *shared.at<uint16_t>(element.address + 2 * element.column, 1) =
          static_cast<uint16_t>(x[i] >> (16 * part));
    }
  }
}

// ---- lanes

enum class Shuffle { idx, bfly, up, down };

// As shfl.sync: `clamp` holds the last lane of a segment and, above, which bits of a lane's number say its segment.
inline uint32_t shuffle(Shuffle kind, uint32_t value, uint32_t by, uint32_t clamp, uint32_t mask,
                        bool& is_valid) {
  const uint32_t self = lane(), segment = clamp >> 8 & 31, last = clamp & 31;
  const uint32_t greatest = (self & segment) | (last & ~segment);
  const uint32_t least = self & segment;
  int64_t source = self;
  switch (kind) {
    case Shuffle::idx:
      source = least | (by & 31 & ~segment);
      is_valid = source <= greatest;
      break;
    case Shuffle::bfly:
      source = self ^ (by & 31);
      is_valid = source <= greatest;
      break;
    case Shuffle::up:
      source = int64_t{self} - (by & 31);
      is_valid = source >= greatest;
      break;
    case Shuffle::down:
      source = self + (by & 31);
      is_valid = source <= greatest;
      break;
  }
  if (!is_valid) source = self;
  return static_cast<uint32_t>(meet::shuffle(mask, value, static_cast<int>(source)));
}

template <class T, class Combine>
T reduced(T value, uint32_t mask, Combine combine) {
  T result = value;
  for (int source = 0; source < 32; ++source) {
    if ((mask >> source & 1) == 0) continue;
    const uint64_t other = meet::shuffle(mask, static_cast<uint32_t>(value), source);
    result = combine(result, static_cast<T>(other));
  }
  return result;
}

// ---- arithmetic that C++ leaves undefined, or lacks

template <class T>
T quotient(T a, T b) {
  if constexpr (std::is_signed_v<T>)
    if (b == -1) return static_cast<T>(-static_cast<std::make_unsigned_t<T>>(a));
  return b == 0 ? static_cast<T>(-1) : static_cast<T>(a / b);
}
template <class T>
T remainder(T a, T b) {
  if constexpr (std::is_signed_v<T>)
    if (b == -1) return 0;
  return b == 0 ? a : static_cast<T>(a % b);
}
template <class T>
T left(T a, uint32_t by) {
  return by >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << by);
}
template <class T>
T right(T a, uint32_t by) {
  if (by >= 8 * sizeof(T)) return a < 0 ? static_cast<T>(-1) : T{0};
  return static_cast<T>(a >> by);
}
template <class T>
T mask_of(uint32_t length) {
  return length >= 8 * sizeof(T) ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << length) - 1);
}
// Of signed types the highest bit of the field fills what is above it.
template <class T>
T field(T a, uint32_t at, uint32_t length) {
  using Unsigned = std::make_unsigned_t<T>;
  const auto mask = mask_of<Unsigned>(length & 255);
  const auto found = static_cast<Unsigned>(static_cast<Unsigned>(right(a, at & 255)) & mask);
  const auto sign = static_cast<Unsigned>(mask ^ (mask >> 1));
  const bool is_negative = std::is_signed_v<T> && (length & 255) != 0 && (found & sign) != 0;
  return static_cast<T>(is_negative ? static_cast<Unsigned>(found | ~mask) : found);
}
template <class T>
T with_field(T into, T a, uint32_t at, uint32_t length) {
  const T mask = left(mask_of<T>(length & 255), at & 255);
  return static_cast<T>((into & ~mask) | (left(a, at & 255) & mask));
}
inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | uint64_t{b} << 32;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t choice = selector >> (4 * i) & 15;
    auto byte = static_cast<uint8_t>(bytes >> (8 * (choice & 7)));
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= uint32_t{byte} << (8 * i);
  }
  return result;
}
inline uint32_t funnel_left(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) << (by & 31) >> 32);
}
inline uint32_t funnel_right(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (by & 31));
}
// Toward zero; beyond the range the nearest, NaN 0.
template <class To, class From>
To truncated(From x) {
  if (std::isnan(x)) return 0;
  if (x <= static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (x >= static_cast<From>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return static_cast<To>(x);
}

}  // namespace ptx
}  // namespace pycoll::sim
