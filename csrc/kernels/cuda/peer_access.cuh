// The only way in which kernels touch memory that another rank can see. docs/kernels.md has the contract at length; in short:
//
// | function                         | order                                                                           |
// |----------------------------------|---------------------------------------------------------------------------------|
// | load_acquire, store_release      | what was written before the release is seen after the acquire that reads it      |
// | load_relaxed, store_relaxed      | one word, all or nothing; orders nothing else                                    |
// | fetch_add_relaxed, fetch_max_relaxed | read and write in one, of which every other access is before or after       |
// | load_plain, store_plain          | no order and no atomicity: only where a release and an acquire keep others away  |
// | load_two_atoms, store_two_atoms  | each 8-byte half all or nothing, in any order; orders nothing else               |
// | load_line, store_line            | 8 lanes move 128 bytes that arrive together; orders nothing else                 |
//
// All have system scope: the other side may be a thread of this GPU, of another one, or of the host. Addresses lie in global
// memory and are aligned to the size of the access. A relaxed or atom access never races; a plain one must not meet any access
// to the same bytes by another thread that is not ordered with it, unless both are loads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.cuh"

namespace pycoll::cuda {

// What one thread moves at once.
struct alignas(16) Vector16 {
  uint32_t word[4];
};

namespace peer {

// ---- words: signals, counters, epochs

PYCOLL_DEVICE uint32_t load_acquire(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
PYCOLL_DEVICE uint64_t load_acquire(const uint64_t* p) {
  uint64_t x;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
PYCOLL_DEVICE uint32_t load_relaxed(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
PYCOLL_DEVICE uint64_t load_relaxed(const uint64_t* p) {
  uint64_t x;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}

PYCOLL_DEVICE void store_release(uint32_t* p, uint32_t x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
PYCOLL_DEVICE void store_release(uint64_t* p, uint64_t x) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
PYCOLL_DEVICE void store_relaxed(uint32_t* p, uint32_t x) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
PYCOLL_DEVICE void store_relaxed(uint64_t* p, uint64_t x) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}

// Return what the word held before.
PYCOLL_DEVICE uint32_t fetch_add_relaxed(uint32_t* p, uint32_t x) {
  uint32_t before;
  asm volatile("atom.relaxed.sys.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(p), "r"(x)
               : "memory");
  return before;
}
PYCOLL_DEVICE uint32_t fetch_max_relaxed(uint32_t* p, uint32_t x) {
  uint32_t before;
  asm volatile("atom.relaxed.sys.global.max.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(p), "r"(x)
               : "memory");
  return before;
}

// ---- payload

PYCOLL_DEVICE Vector16 load_plain(const Vector16* p) {
  Vector16 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}
PYCOLL_DEVICE void store_plain(Vector16* p, const Vector16& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// Scalars of 1, 2, 4 and 8 bytes: for edges, where a vector would reach beyond the data or is not aligned.
PYCOLL_DEVICE uint8_t load_plain(const uint8_t* p) {
  uint32_t x;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return static_cast<uint8_t>(x);
}
PYCOLL_DEVICE uint16_t load_plain(const uint16_t* p) {
  uint16_t x;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(p) : "memory");
  return x;
}
PYCOLL_DEVICE uint32_t load_plain(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
PYCOLL_DEVICE uint64_t load_plain(const uint64_t* p) {
  uint64_t x;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
PYCOLL_DEVICE void store_plain(uint8_t* p, uint8_t x) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(uint32_t{x}) : "memory");
}
PYCOLL_DEVICE void store_plain(uint16_t* p, uint16_t x) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(x) : "memory");
}
PYCOLL_DEVICE void store_plain(uint32_t* p, uint32_t x) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
PYCOLL_DEVICE void store_plain(uint64_t* p, uint64_t x) {
  asm volatile("st.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}

// ---- payload that carries its own flags

// 16 bytes in one instruction, relied on only as two atoms of 8 bytes: a reader may see the new one half with the old other.
// Each atom carries a flag beside its data, so no other signal is needed.
PYCOLL_DEVICE Vector16 load_two_atoms(const Vector16* p) {
  uint64_t low, high;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(low), "=l"(high)
               : "l"(p)
               : "memory");
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
          static_cast<uint32_t>(high >> 32)};
}
PYCOLL_DEVICE void store_two_atoms(Vector16* p, const Vector16& v) {
  const uint64_t low = v.word[0] | uint64_t{v.word[1]} << 32;
  const uint64_t high = v.word[2] | uint64_t{v.word[3]} << 32;
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(low), "l"(high)
               : "memory");
}

// A line of 128 bytes, aligned to 128. Lanes 8 k to 8 k + 7 of a warp call together and converged; lane 8 k + i passes the
// line's bytes 16 i to 16 i + 15. What one store writes is seen by one load all or not at all. That is what NVLink and the
// caches of sm_70 to sm_100 do; PTX does not promise it, and PCIe does not do it.
PYCOLL_DEVICE Vector16 load_line(const Vector16* p) { return load_two_atoms(p); }
PYCOLL_DEVICE void store_line(Vector16* p, const Vector16& v) { store_two_atoms(p, v); }

// ---- waiting

// Between two polls that found nothing new. `long_wait`: the peer is far behind, and others may use the memory meanwhile.
PYCOLL_DEVICE void spin_hint(bool long_wait = false) {
  if (long_wait) __nanosleep(100);
}

// Nanoseconds of a clock that all threads of the GPU share; it may advance in steps of a microsecond.
PYCOLL_DEVICE uint64_t clock_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace peer
}  // namespace pycoll::cuda
