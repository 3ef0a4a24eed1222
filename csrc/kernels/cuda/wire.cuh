// Wires: how elements look between ranks. Storage, wire and accumulate type are three things; collectives are written for any wire,
// and a quantised collective is the choice of another one.
//
// What travels is cut into *blocks*, and threads share out the blocks of a segment: for_each() gives a thread its positions, one
// after another, together with those of its warp where the wire needs that. At a position
//
//   source(chunk, ...), target(...)         elements in user memory
//   load(source, begin, at) -> Item         takes the elements from user memory as they will travel
//   put(slot, at, item), get(slot, at)      to and from a slot
//   send(stripe, at, item), look(stripe, at) -> Packets, item(packets)      the same by LL packets
//   widen(item) -> Sum                      to the accumulate type
//   narrow(sum, at) -> Item                 a result as it will travel; all threads of a block take part
//   has(at), all(condition)                 whether there is a block; whether a condition holds for the threads that go together
//   store(target, begin, at, item), store_sum(...)      to user memory, what has travelled, or a sum that need not
//
// `slot` is a slot's beginning, and `begin` the place of the segment among the blocks of the source or target.
//
// This file has the wire of elements that travel as they are: a block is a unit of 16 bytes, and an Item is its bytes.
#pragma once

#include <cstddef>

#include "kernels/cuda/edges.cuh"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ll.cuh"
#include "kernels/cuda/peer_access.cuh"
#include "kernels/cuda/thread_group.cuh"

namespace pycoll::cuda {

template <class ElementType>
class PlainWire {
 public:
  using Element = ElementType;  // what `combine` and its like take
  using Item = Vector16;
  using Sum = Accumulator<Element>;
  using Packets = ll::UnitPackets;
  using Source = Units<PartOf<Element>, const std::byte>;
  using Target = Units<PartOf<Element>, std::byte>;
  struct Position {
    size_t block;  // of the segment
  };
  // Of the one-shot kernel: peers whose packets are asked for at once, and threads.
  static constexpr int kPacketBatch = 4;
  static constexpr int kPacketThreads = 512;

  PYCOLL_DEVICE PlainWire(const WireFormat&, size_t slot_units, size_t lead_bytes)
      : slot_units_(slot_units), lead_bytes_(lead_bytes) {}

  // Of elements that begin with element `begin` of what the lead is told of.
  PYCOLL_DEVICE size_t num_blocks(size_t begin, size_t numel) const {
    return num_units(lead(begin), numel * kItem);
  }
  PYCOLL_DEVICE size_t blocks_in_slot() const { return slot_units_; }
  PYCOLL_DEVICE size_t units_in_packets(size_t num_blocks) const { return num_blocks; }

  // `fn(position)` gives false to end it.
  template <class Fn>
  PYCOLL_DEVICE bool for_each(Share threads, size_t num_blocks, Fn fn) const {
    for (size_t block = threads.first; block < num_blocks; block += threads.stride)
      if (!fn(Position{block})) return false;
    return true;
  }
  PYCOLL_DEVICE bool has(const Position&) const { return true; }
  // Of the threads that go through positions together.
  PYCOLL_DEVICE bool all(bool condition) const { return condition; }

  // `chunk` is where they are.
  PYCOLL_DEVICE Source source(const void* chunk, size_t begin, size_t numel) const {
    return input_units<Element>(chunk, numel, lead(begin));
  }
  PYCOLL_DEVICE Target target(void* chunk, size_t begin, size_t numel) const {
    return output_units<Element>(chunk, numel, lead(begin));
  }
  static PYCOLL_DEVICE const void* at(const void* data, size_t index) {
    return element_at<Element>(data, index);
  }
  PYCOLL_DEVICE Item load(const Source& source, size_t begin, const Position& at) const {
    return source.load(begin + at.block);
  }
  PYCOLL_DEVICE void store(const Target& target, size_t begin, const Position& at,
                           const Item& item) const {
    target.store(begin + at.block, item);
  }
  PYCOLL_DEVICE void store_sum(const Target& target, size_t begin, const Position& at,
                               const Sum& sum) const {
    store(target, begin, at, narrow(sum, at));
  }

  PYCOLL_DEVICE void put(Vector16* slot, const Position& at, const Item& item) const {
    peer::store_plain(slot + at.block, item);
  }
  PYCOLL_DEVICE Item get(const Vector16* slot, const Position& at) const {
    return peer::load_plain(slot + at.block);
  }
  PYCOLL_DEVICE void send(const ll::Stripe& stripe, const Position& at, const Item& item) const {
    stripe.send(at.block, item);
  }
  PYCOLL_DEVICE Packets look(const ll::Stripe& stripe, const Position& at) const {
    return stripe.look(at.block);
  }
  PYCOLL_DEVICE Item item(const Packets& packets) const { return packets.data(); }

  PYCOLL_DEVICE Sum widen(const Item& item) const { return cuda::widen<Element>(item); }
  PYCOLL_DEVICE Item narrow(const Sum& sum, const Position&) const {
    return cuda::narrow<Element>(sum);
  }

 private:
  static constexpr size_t kItem = sizeof(typename Element::Storage);
  PYCOLL_DEVICE size_t lead(size_t begin) const { return lead_at(lead_bytes_, begin * kItem); }

  const size_t slot_units_;
  const size_t lead_bytes_;
};

// ---- reductions in rank order

// Adds terms up, one rank after another.
template <class Wire>
class RankOrderSum {
 public:
  PYCOLL_DEVICE RankOrderSum(const Reduction& reduction, const double* factors)
      : reduction_(reduction), factors_(factors) {}

  PYCOLL_DEVICE void add(int rank, typename Wire::Sum term) {
    if (reduction_.op == ReduceOp::kPremulSum) scale(term, factors_[rank]);
    if (is_first_) {
      sum_ = term;
    } else {
      combine(reduction_.op, sum_, term);
    }
    is_first_ = false;
  }
  PYCOLL_DEVICE typename Wire::Sum result() {
    if (reduction_.op == ReduceOp::kAvg) divide(sum_, reduction_.divisor);
    return sum_;
  }

 private:
  const Reduction& reduction_;
  const double* const factors_;
  typename Wire::Sum sum_ = {};
  bool is_first_ = true;
};

}  // namespace pycoll::cuda
