// The simulator's csrc/kernels/cuda/peer_access.cuh: same names and contracts. Under strong memory the accesses are made here, in
// code that sanitizers look at; weak memory makes them itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "accesses.h"
#include "kernels/cuda/device.cuh"

namespace pycoll::cuda {

struct alignas(16) Vector16 {
  uint32_t word[4];
};

namespace peer {

using sim::Order;
using sim::Where;

inline uint32_t load_acquire(const uint32_t* p, Where where = Where::current()) {
  return sim::load_word(p, Order::kAcquire, "load_acquire", where);
}
inline uint64_t load_acquire(const uint64_t* p, Where where = Where::current()) {
  return sim::load_word(p, Order::kAcquire, "load_acquire", where);
}
inline uint32_t load_relaxed(const uint32_t* p, Where where = Where::current()) {
  return sim::load_word(p, Order::kRelaxed, "load_relaxed", where);
}
inline uint64_t load_relaxed(const uint64_t* p, Where where = Where::current()) {
  return sim::load_word(p, Order::kRelaxed, "load_relaxed", where);
}

inline void store_release(uint32_t* p, uint32_t x, Where where = Where::current()) {
  sim::store_word(p, x, Order::kRelease, "store_release", where);
}
inline void store_release(uint64_t* p, uint64_t x, Where where = Where::current()) {
  sim::store_word(p, x, Order::kRelease, "store_release", where);
}
inline void store_relaxed(uint32_t* p, uint32_t x, Where where = Where::current()) {
  sim::store_word(p, x, Order::kRelaxed, "store_relaxed", where);
}
inline void store_relaxed(uint64_t* p, uint64_t x, Where where = Where::current()) {
  sim::store_word(p, x, Order::kRelaxed, "store_relaxed", where);
}

inline uint32_t fetch_add_relaxed(uint32_t* p, uint32_t x, Where where = Where::current()) {
  return sim::fetch_add(p, x, "fetch_add_relaxed", where);
}
inline uint32_t fetch_max_relaxed(uint32_t* p, uint32_t x, Where where = Where::current()) {
  return sim::fetch_max(p, x, "fetch_max_relaxed", where);
}

template <class T>
T load_plain(const T* p, Where where = Where::current()) {
  return sim::load_plain(p, where);
}
template <class T>
void store_plain(T* p, const T& x, Where where = Where::current()) {
  sim::store_plain(p, x, where);
}

inline Vector16 load_two_atoms(const Vector16* p, Where where = Where::current()) {
  Vector16 v;
  sim::load_two_atoms(p, &v, where);
  return v;
}
inline void store_two_atoms(Vector16* p, const Vector16& v, Where where = Where::current()) {
  sim::store_two_atoms(p, &v, where);
}
inline Vector16 load_line(const Vector16* p, Where where = Where::current()) {
  Vector16 v;
  sim::load_line(p, &v, where);
  return v;
}
inline void store_line(Vector16* p, const Vector16& v, Where where = Where::current()) {
  sim::store_line(p, &v, where);
}

inline void spin_hint(bool = false) { sim::Scheduler::current()->spin(); }
inline uint64_t clock_ns() { return sim::Scheduler::current()->clock_ns(); }

}  // namespace peer
}  // namespace pycoll::cuda
