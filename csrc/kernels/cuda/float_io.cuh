// Runs of elements in registers, widened: loaded and stored in vectors of 16 bytes where the address allows it, else one by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cuda/edges.cuh"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/peer_access.cuh"
#include "kernels/cuda/thread_group.cuh"

namespace pycoll::cuda {

// Codes of 8 bits that stand for -127 to 127.
struct Int8Code {
  static constexpr DType kDType = DType::kInt8;
  using Storage = int8_t;
  using Accumulate = float;
  static PYCOLL_DEVICE float widen(int8_t x) { return static_cast<float>(x); }
  // To the nearest, ties to even: adding 1.5 2^23 leaves the rounded number in the low bits.
  static PYCOLL_DEVICE int8_t narrow(float x) {
    return static_cast<int8_t>(bits_from_float(x + 12582912.0f) & 0xffu);
  }
};

template <class Code>
inline constexpr float kLargestCode = 0.0f;
template <>
inline constexpr float kLargestCode<Float8E4M3FN> = 448.0f;
template <>
inline constexpr float kLargestCode<Float8E5M2> = 57344.0f;
template <>
inline constexpr float kLargestCode<Int8Code> = 127.0f;

// `kNumel` elements in the type in which they accumulate. A multiple of 16 bytes.
template <class Element, int kNumel>
struct Run {
  using Storage = typename Element::Storage;
  using Wide = typename Element::Accumulate;
  static constexpr int kNumVectors = kNumel * static_cast<int>(sizeof(Storage)) / 16;
  static_assert(kNumVectors > 0);

  static PYCOLL_DEVICE void load_vectors(const void* from, Wide (&x)[kNumel]) {
    Vector16 vectors[kNumVectors];
#pragma unroll
    for (int v = 0; v < kNumVectors; ++v)
      vectors[v] = peer::load_plain(static_cast<const Vector16*>(from) + v);
    Storage stored[kNumel];
    std::memcpy(stored, vectors, sizeof(stored));
#pragma unroll
    for (int i = 0; i < kNumel; ++i) x[i] = Element::widen(stored[i]);
  }
  static PYCOLL_DEVICE void store_vectors(void* to, const Wide (&x)[kNumel]) {
    Storage stored[kNumel];
#pragma unroll
    for (int i = 0; i < kNumel; ++i) stored[i] = Element::narrow(x[i]);
    Vector16 vectors[kNumVectors];
    std::memcpy(vectors, stored, sizeof(stored));
#pragma unroll
    for (int v = 0; v < kNumVectors; ++v)
      peer::store_plain(static_cast<Vector16*>(to) + v, vectors[v]);
  }
};

// One element, in parts where it is wider than its alignment.
template <class Element>
PYCOLL_DEVICE typename Element::Accumulate load_scalar(const void* from) {
  using Part = PartOf<Element>;
  Part parts[sizeof(typename Element::Storage) / sizeof(Part)];
#pragma unroll
  for (size_t i = 0; i < sizeof(parts) / sizeof(Part); ++i)
    parts[i] = peer::load_plain(static_cast<const Part*>(from) + i);
  typename Element::Storage stored;
  std::memcpy(&stored, parts, sizeof(stored));
  return Element::widen(stored);
}
template <class Element>
PYCOLL_DEVICE void store_scalar(void* to, typename Element::Accumulate x) {
  using Part = PartOf<Element>;
  const typename Element::Storage stored = Element::narrow(x);
  Part parts[sizeof(stored) / sizeof(Part)];
  std::memcpy(parts, &stored, sizeof(stored));
#pragma unroll
  for (size_t i = 0; i < sizeof(parts) / sizeof(Part); ++i)
    peer::store_plain(static_cast<Part*>(to) + i, parts[i]);
}

// Of a block or a bucket, once for many elements.
PYCOLL_DEVICE float load_scale(const float* from) {
  return float_from_bits(peer::load_plain(reinterpret_cast<const uint32_t*>(from)));
}
PYCOLL_DEVICE void store_scale(float* to, float scale) {
  peer::store_plain(reinterpret_cast<uint32_t*>(to), bits_from_float(scale));
}

PYCOLL_DEVICE bool is_vector_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Vector16) == 0;
}

// The first elements of a run, of which `available` are there: by vectors where they reach, else one by one. What is not there is left
// alone.
template <class Element, int kRun>
PYCOLL_DEVICE void load_run(const std::byte* from, size_t available,
                            typename Element::Accumulate (&x)[kRun]) {
  if (available >= kRun && is_vector_aligned(from))
    return Run<Element, kRun>::load_vectors(from, x);
#pragma unroll
  for (int i = 0; i < kRun; ++i)
    if (static_cast<size_t>(i) < available)
      x[i] =
          load_scalar<Element>(from + static_cast<size_t>(i) * sizeof(typename Element::Storage));
}
template <class Element, int kRun>
PYCOLL_DEVICE void store_run(std::byte* to, size_t available,
                             const typename Element::Accumulate (&x)[kRun]) {
  if (available >= kRun && is_vector_aligned(to)) return Run<Element, kRun>::store_vectors(to, x);
#pragma unroll
  for (int i = 0; i < kRun; ++i)
    if (static_cast<size_t>(i) < available)
      store_scalar<Element>(to + static_cast<size_t>(i) * sizeof(typename Element::Storage), x[i]);
}

// Elements of one or two arrays: a head that goes one by one until both are aligned to 16 bytes, runs of vectors, and a tail. Where
// they are never both aligned all of it is tail.
class RunSplit {
 public:
  // `kRun` elements of the narrower type have 16 bytes. Either array may be null.
  template <class A, class B>
  static PYCOLL_DEVICE RunSplit of(const void* a, const void* b, size_t numel) {
    constexpr size_t kA = sizeof(typename A::Storage), kB = sizeof(typename B::Storage);
    constexpr size_t kRun = 16 / (kA < kB ? kA : kB);
    const bool by_a = b == nullptr || (a != nullptr && kA < kB);
    const auto narrow = reinterpret_cast<uintptr_t>(by_a ? a : b);
    const size_t head = (16 - narrow % 16) % 16 / (by_a ? kA : kB);
    const bool aligned =
        is_vector_aligned(static_cast<const std::byte*>(a) + (a ? head * kA : 0)) &&
        is_vector_aligned(static_cast<const std::byte*>(b) + (b ? head * kB : 0));
    if (!aligned || numel < head + kRun) return {0, 0};
    return {head, head + (numel - head) / kRun * kRun};
  }

  // Elements begin() to end() are in runs.
  PYCOLL_DEVICE size_t begin() const { return begin_; }
  PYCOLL_DEVICE size_t end() const { return end_; }
  // The others, by number: first those of the head.
  PYCOLL_DEVICE size_t num_single(size_t numel) const { return numel - (end_ - begin_); }
  PYCOLL_DEVICE size_t single(size_t i) const { return i < begin_ ? i : i - begin_ + end_; }

 private:
  PYCOLL_DEVICE RunSplit(size_t begin, size_t end) : begin_(begin), end_(end) {}
  size_t begin_, end_;
};

// The bits of |x|, which order like numbers, with NaN above all.
PYCOLL_DEVICE uint32_t magnitude_bits(float x) { return bits_from_float(x) & 0x7fffffffu; }

PYCOLL_DEVICE uint32_t max_of_warp(uint32_t x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const uint32_t other = __shfl_xor_sync(kWholeWarp, x, lanes);
    if (other > x) x = other;
  }
  return x;
}

}  // namespace pycoll::cuda
