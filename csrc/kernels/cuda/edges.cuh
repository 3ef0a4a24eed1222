// Units of user memory that a 16-byte access cannot reach: the last one, when the data ends in it, and all of them when the
// data is not aligned to 16 bytes. They are moved in parts as wide as the element's alignment allows.
//
// Only the functions of this file may access memory in less than 8 bytes within a loop; `make cuda-check` holds that.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/peer_access.cuh"

namespace pycoll::cuda {

template <size_t kBytes>
struct PartOfSize;
template <>
struct PartOfSize<1> {
  using Type = uint8_t;
};
template <>
struct PartOfSize<2> {
  using Type = uint16_t;
};
template <>
struct PartOfSize<4> {
  using Type = uint32_t;
};
template <>
struct PartOfSize<8> {
  using Type = uint64_t;
};

// What an element's address is aligned to: complex numbers to their halves.
template <class Element>
inline constexpr size_t kPartBytes =
    sizeof(typename Element::Storage) /
    (info(Element::kDType).dtype_class == DTypeClass::kComplex ? 2 : 1);

template <class Element>
using PartOf = typename PartOfSize<kPartBytes<Element>>::Type;

// The first `nbytes` of a unit; zeros follow.
template <class Part>
PYCOLL_DEVICE Vector16 load_edge(const Part* from, size_t nbytes) {
  Part parts[sizeof(Vector16) / sizeof(Part)];
#pragma unroll
  for (size_t i = 0; i < sizeof(Vector16) / sizeof(Part); ++i)
    parts[i] = i * sizeof(Part) < nbytes ? peer::load_plain(from + i) : Part{0};
  Vector16 unit;
  std::memcpy(&unit, parts, sizeof(unit));
  return unit;
}

template <class Part>
PYCOLL_DEVICE void store_edge(Part* to, const Vector16& unit, size_t nbytes) {
  Part parts[sizeof(Vector16) / sizeof(Part)];
  std::memcpy(parts, &unit, sizeof(unit));
#pragma unroll
  for (size_t i = 0; i < sizeof(Vector16) / sizeof(Part); ++i)
    if (i * sizeof(Part) < nbytes) peer::store_plain(to + i, parts[i]);
}

// User memory as units. `Byte` is std::byte or const std::byte; addresses are aligned to a `Part`.
template <class Part, class Byte>
class Units {
 public:
  PYCOLL_DEVICE Units(Byte* data, size_t nbytes)
      : data_(data),
        nbytes_(nbytes),
        num_vectors_(is_aligned(data) ? nbytes_ / sizeof(Vector16) : 0) {}

  PYCOLL_DEVICE Vector16 load(size_t unit) const {
    const Byte* from = data_ + unit * sizeof(Vector16);
    if (unit < num_vectors_) return peer::load_plain(reinterpret_cast<const Vector16*>(from));
    return load_edge(reinterpret_cast<const Part*>(from), bytes_from(unit));
  }

  PYCOLL_DEVICE void store(size_t unit, const Vector16& value) const {
    Byte* to = data_ + unit * sizeof(Vector16);
    if (unit < num_vectors_) {
      peer::store_plain(reinterpret_cast<Vector16*>(to), value);
    } else {
      store_edge(reinterpret_cast<Part*>(to), value, bytes_from(unit));
    }
  }

 private:
  static PYCOLL_DEVICE bool is_aligned(const void* p) {
    return reinterpret_cast<uintptr_t>(p) % sizeof(Vector16) == 0;
  }
  PYCOLL_DEVICE size_t bytes_from(size_t unit) const { return nbytes_ - unit * sizeof(Vector16); }

  Byte* data_;
  size_t nbytes_;
  size_t num_vectors_;  // units that one access reaches
};

// The same of elements. Element `begin` of `data` is the first.
template <class Element>
PYCOLL_DEVICE Units<PartOf<Element>, const std::byte> input_units(const void* data, size_t begin,
                                                                  size_t numel) {
  constexpr size_t kItem = sizeof(typename Element::Storage);
  return {static_cast<const std::byte*>(data) + begin * kItem, numel * kItem};
}
template <class Element>
PYCOLL_DEVICE Units<PartOf<Element>, std::byte> output_units(void* data, size_t begin,
                                                             size_t numel) {
  constexpr size_t kItem = sizeof(typename Element::Storage);
  return {static_cast<std::byte*>(data) + begin * kItem, numel * kItem};
}

}  // namespace pycoll::cuda
