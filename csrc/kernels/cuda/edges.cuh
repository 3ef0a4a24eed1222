// Units of user memory that a 16-byte access cannot reach: the first and the last one, when the data begins or ends in it, and all of
// them when units are not aligned to 16 bytes. They are moved in parts as wide as the element's alignment allows.
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

// Bytes `begin` to `end` of a unit that begins at `from`; zeros for the others.
template <class Part>
PYCOLL_DEVICE Vector16 load_edge(const Part* from, size_t begin, size_t end) {
  Part parts[sizeof(Vector16) / sizeof(Part)];
#pragma unroll
  for (size_t i = 0; i < sizeof(Vector16) / sizeof(Part); ++i) {
    const size_t at = i * sizeof(Part);
    parts[i] = at >= begin && at < end ? peer::load_plain(from + i) : Part{0};
  }
  Vector16 unit;
  std::memcpy(&unit, parts, sizeof(unit));
  return unit;
}

template <class Part>
PYCOLL_DEVICE void store_edge(Part* to, const Vector16& unit, size_t begin, size_t end) {
  Part parts[sizeof(Vector16) / sizeof(Part)];
  std::memcpy(parts, &unit, sizeof(unit));
#pragma unroll
  for (size_t i = 0; i < sizeof(Vector16) / sizeof(Part); ++i) {
    const size_t at = i * sizeof(Part);
    if (at >= begin && at < end) peer::store_plain(to + i, parts[i]);
  }
}

// Bytes of a unit before data that begins `lead_bytes` behind a multiple of 16, and then `offset` bytes further on.
PYCOLL_HOST_DEVICE constexpr size_t lead_at(size_t lead_bytes, size_t offset) {
  return (lead_bytes + offset) % kUnitBytes;
}
PYCOLL_HOST_DEVICE constexpr size_t num_units(size_t lead, size_t nbytes) {
  return nbytes == 0 ? 0 : ceil_div(lead + nbytes, kUnitBytes);
}

// User memory as units: data begins `lead` bytes behind the beginning of unit 0. Which bytes make a unit is for all ranks to agree
// on; whether units can be moved whole depends on where this rank's data lies. `Byte` is std::byte or const std::byte; addresses are
// aligned to a `Part`, and so are leads.
template <class Part, class Byte>
class Units {
 public:
  PYCOLL_DEVICE Units(Byte* data, size_t nbytes, size_t lead)
      : units_(data - lead),
        begin_(lead),
        end_(lead + nbytes),
        end_vectors_(is_aligned(units_) ? end_ / sizeof(Vector16) : 0) {}

  PYCOLL_DEVICE Vector16 load(size_t unit) const {
    const Byte* from = units_ + unit * sizeof(Vector16);
    if (is_vector(unit)) return peer::load_plain(reinterpret_cast<const Vector16*>(from));
    return load_edge(reinterpret_cast<const Part*>(from), first_byte(unit), last_byte(unit));
  }

  PYCOLL_DEVICE void store(size_t unit, const Vector16& value) const {
    Byte* to = units_ + unit * sizeof(Vector16);
    if (is_vector(unit)) {
      peer::store_plain(reinterpret_cast<Vector16*>(to), value);
    } else {
      store_edge(reinterpret_cast<Part*>(to), value, first_byte(unit), last_byte(unit));
    }
  }

 private:
  static PYCOLL_DEVICE bool is_aligned(const void* p) {
    return reinterpret_cast<uintptr_t>(p) % sizeof(Vector16) == 0;
  }
  // Whether one access reaches all of it.
  PYCOLL_DEVICE bool is_vector(size_t unit) const {
    return unit < end_vectors_ && (unit > 0 || begin_ == 0);
  }
  PYCOLL_DEVICE size_t first_byte(size_t unit) const { return unit == 0 ? begin_ : 0; }
  PYCOLL_DEVICE size_t last_byte(size_t unit) const { return end_ - unit * sizeof(Vector16); }

  Byte* units_;
  size_t begin_, end_;  // of the data, from units_ on
  size_t end_vectors_;
};

// The same of elements.
template <class Element>
PYCOLL_DEVICE Units<PartOf<Element>, const std::byte> input_units(const void* data, size_t numel,
                                                                  size_t lead) {
  constexpr size_t kItem = sizeof(typename Element::Storage);
  return {static_cast<const std::byte*>(data), numel * kItem, lead};
}
template <class Element>
PYCOLL_DEVICE Units<PartOf<Element>, std::byte> output_units(void* data, size_t numel,
                                                             size_t lead) {
  constexpr size_t kItem = sizeof(typename Element::Storage);
  return {static_cast<std::byte*>(data), numel * kItem, lead};
}
template <class Element>
PYCOLL_DEVICE const void* element_at(const void* data, size_t index) {
  return static_cast<const std::byte*>(data) + index * sizeof(typename Element::Storage);
}

}  // namespace pycoll::cuda
