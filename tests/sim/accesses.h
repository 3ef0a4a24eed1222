// The accesses of kernels/cuda/peer_access.cuh, as the simulator makes them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "sanitizers.h"
#include "scheduler.h"

namespace pycoll::sim {

// ---- under weak memory (accesses.cpp)

uint64_t weak_load(const void* p, size_t nbytes, Order order);
void weak_store(void* p, uint64_t x, size_t nbytes, Order order);
uint32_t weak_fetch_add(uint32_t* p, uint32_t x);
// What an atomic update finds.
uint64_t weak_newest(const void* p, size_t nbytes, Order order);
// A line, by the last of its eight lanes to arrive.
void move_line(const std::vector<Thread*>& lanes, bool is_store);

// ---- words

template <class T>
T load_word(const T* p, Order order, const char* name, const Where& where) {
  Scheduler& scheduler = *Scheduler::current();
  scheduler.before_access(name, p, sizeof(T), where);
  scheduler.note_poll(p);
  if (scheduler.is_weak()) return static_cast<T>(weak_load(p, sizeof(T), order));
  return order == Order::kAcquire ? __atomic_load_n(p, __ATOMIC_ACQUIRE)
                                  : __atomic_load_n(p, __ATOMIC_RELAXED);
}

template <class T>
void store_word(T* p, T x, Order order, const char* name, const Where& where) {
  Scheduler& scheduler = *Scheduler::current();
  scheduler.before_access(name, p, sizeof(T), where);
  if (scheduler.is_weak()) {
    weak_store(p, x, sizeof(T), order);
  } else if (order == Order::kRelease) {
    __atomic_store_n(p, x, __ATOMIC_RELEASE);
  } else {
    __atomic_store_n(p, x, __ATOMIC_RELAXED);
  }
  scheduler.note_store(p, sizeof(T));
}

inline uint32_t fetch_add(uint32_t* p, uint32_t x, const char* name, const Where& where) {
  Scheduler& scheduler = *Scheduler::current();
  scheduler.before_access(name, p, sizeof(x), where);
  const uint32_t before =
      scheduler.is_weak() ? weak_fetch_add(p, x) : __atomic_fetch_add(p, x, __ATOMIC_RELAXED);
  scheduler.note_store(p, sizeof(x));
  return before;
}

inline uint32_t fetch_max(uint32_t* p, uint32_t x, const char* name, const Where& where) {
  Scheduler& scheduler = *Scheduler::current();
  scheduler.before_access(name, p, sizeof(x), where);
  // Fibers do not interrupt one another, so this is one step of the kernel.
  const uint32_t before = __atomic_load_n(p, __ATOMIC_RELAXED);
  const uint32_t addend = std::max(before, x) - before;
  if (scheduler.is_weak()) {
    weak_fetch_add(p, addend);
  } else {
    __atomic_fetch_add(p, addend, __ATOMIC_RELAXED);
  }
  scheduler.note_store(p, sizeof(x));
  return before;
}

// ---- payload

template <class T>
T load_plain(const T* p, const Where& where) {
  Scheduler& scheduler = *Scheduler::current();
  scheduler.before_access("load_plain", p, sizeof(T), where);
  if (scheduler.is_weak()) scheduler.check_race(p, sizeof(T), RaceDetector::Access::kPlainLoad);
  return *p;
}

template <class T>
void store_plain(T* p, const T& x, const Where& where) {
  Scheduler& scheduler = *Scheduler::current();
  scheduler.before_access("store_plain", p, sizeof(T), where);
  if (scheduler.is_weak()) scheduler.check_race(p, sizeof(T), RaceDetector::Access::kPlainStore);
  *p = x;
}

// The halves in either order, and others may come between.
inline void load_two_atoms(const void* from, void* to, const Where& where) {
  Scheduler& scheduler = *Scheduler::current();
  const auto* atoms = static_cast<const uint64_t*>(from);
  uint64_t values[2];
  const bool high_first = scheduler.toss_coin();
  for (int i = 0; i < 2; ++i) {
    const int half = i ^ static_cast<int>(high_first);
    values[half] = load_word(atoms + half, Order::kRelaxed, "load_two_atoms", where);
  }
  std::memcpy(to, values, sizeof(values));
}

inline void store_two_atoms(void* to, const void* from, const Where& where) {
  Scheduler& scheduler = *Scheduler::current();
  auto* atoms = static_cast<uint64_t*>(to);
  uint64_t values[2];
  std::memcpy(values, from, sizeof(values));
  const bool high_first = scheduler.toss_coin();
  for (int i = 0; i < 2; ++i) {
    const int half = i ^ static_cast<int>(high_first);
    store_word(atoms + half, values[half], Order::kRelaxed, "store_two_atoms", where);
  }
}

inline void load_line(const void* from, void* to, const Where& where) {
  Scheduler& scheduler = *Scheduler::current();
  if (scheduler.tears_lines()) return load_two_atoms(from, to, where);
  const Unwatched unwatched;
  scheduler.before_access("load_line", from, 16, where);
  scheduler.note_poll(from);
  uint64_t parts[2] = {};
  meet::line(const_cast<void*>(from), parts,
             [](std::vector<Thread*>& lanes) { move_line(lanes, false); });
  std::memcpy(to, parts, sizeof(parts));
}

inline void store_line(void* to, const void* from, const Where& where) {
  Scheduler& scheduler = *Scheduler::current();
  if (scheduler.tears_lines()) return store_two_atoms(to, from, where);
  const Unwatched unwatched;
  scheduler.before_access("store_line", to, 16, where);
  uint64_t parts[2];
  std::memcpy(parts, from, sizeof(parts));
  meet::line(to, parts, [](std::vector<Thread*>& lanes) { move_line(lanes, true); });
  scheduler.note_store(to, 16);
}

}  // namespace pycoll::sim
