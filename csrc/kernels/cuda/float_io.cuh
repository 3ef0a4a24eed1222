// Runs of elements in registers, as float32: loaded and stored in vectors of 16 bytes where the address allows it, else one by one.
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
  static PYCOLL_DEVICE float widen(int8_t x) { return static_cast<float>(x); }
  // To the nearest, ties to even: adding 1.5 2^23 leaves the rounded number in the low bits.
  static PYCOLL_DEVICE int8_t narrow(float x) {
    return static_cast<int8_t>(bits_from_float(x + 12582912.0f) & 0xffu);
  }
};

// `kNumel` elements of a type that takes part in float32. A multiple of 16 bytes.
template <class Element, int kNumel>
struct Run {
  using Storage = typename Element::Storage;
  static constexpr int kNumVectors = kNumel * static_cast<int>(sizeof(Storage)) / 16;
  static_assert(kNumVectors > 0);

  static PYCOLL_DEVICE void load_vectors(const void* from, float (&x)[kNumel]) {
    Vector16 vectors[kNumVectors];
#pragma unroll
    for (int v = 0; v < kNumVectors; ++v)
      vectors[v] = peer::load_plain(static_cast<const Vector16*>(from) + v);
    Storage stored[kNumel];
    std::memcpy(stored, vectors, sizeof(stored));
#pragma unroll
    for (int i = 0; i < kNumel; ++i) x[i] = Element::widen(stored[i]);
  }
  static PYCOLL_DEVICE void store_vectors(void* to, const float (&x)[kNumel]) {
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

template <class Element>
PYCOLL_DEVICE float load_scalar(const void* from) {
  using Storage = typename Element::Storage;
  const auto bits = peer::load_plain(static_cast<const PartOf<Element>*>(from));
  Storage stored;
  std::memcpy(&stored, &bits, sizeof(stored));
  return Element::widen(stored);
}
template <class Element>
PYCOLL_DEVICE void store_scalar(void* to, float x) {
  const typename Element::Storage stored = Element::narrow(x);
  PartOf<Element> bits;
  std::memcpy(&bits, &stored, sizeof(bits));
  peer::store_plain(static_cast<PartOf<Element>*>(to), bits);
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
