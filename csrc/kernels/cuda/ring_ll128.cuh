// LL128: lanes of a ring whose slots hold lines of 128 bytes that carry their own flags (NCCL's protocol of that name). The receiver
// polls the data itself, so a step takes one trip and no fence; free slots are signalled as in Simple.
//
// Sixteen lanes move a pair of lines, with 15 units of 16 bytes:
//
//   lane  0 ... 6       7                  8 ... 14      15
//   line  units 0 - 6   unit 14, low half  units 7 - 13  unit 14, high half
//                       and flag                         and flag
//
// Lane 7 owns unit 14; its high half goes through a shuffle to lane 15 and back. The flag is the lane's step in this operation,
// with the epoch (meeting.cuh), so no line of another step has it. All lines of a slot lie at the same places whatever is sent,
// so memory that LL128 has written holds flags where flags are looked for, and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/ring_simple.cuh"

namespace pycoll::cuda {

class LL128Lanes {
 public:
  struct Position {
    size_t unit;  // of the segment
    bool has_unit;
    size_t line_pair;
  };

  PYCOLL_DEVICE LL128Lanes(const Group& group, const RingStaging& staging, const BlockGroup& block,
                           uint32_t epoch)
      : block_(block),
        signals_(group, staging, epoch),
        line_pairs_(ceil_div(staging.slot_units, kUnitsPerLinePair)),
        slot_vectors_(ring_slot_vectors(Protocol::kLL128, staging.slot_units)),
        own_(slots_of_block(staging.slots)),
        next_(slots_of_block(staging.slots_of_next)) {}

  PYCOLL_DEVICE bool begin_step(bool, bool sends) {
    const bool waits = sends && block_.thread_rank() == 0;
    return block_.all(!waits || signals_.wait_free(num_sent_));
  }

  // All lanes take part in every line, so `fn` is called for positions without a unit too. It goes on while `fn` gives true.
  template <class Fn>
  PYCOLL_DEVICE bool for_each_unit(size_t num_units, Fn fn) const {
    const size_t num_pairs = ceil_div(num_units, kUnitsPerLinePair);
    const auto stride = static_cast<size_t>(block_.num_threads() / kLanes);
    const auto index = static_cast<size_t>(unit_of_lane());
    for (auto pair = static_cast<size_t>(block_.thread_rank() / kLanes); pair < num_pairs;
         pair += stride) {
      const size_t unit = pair * kUnitsPerLinePair + index;
      const bool has_unit = index < kUnitsPerLinePair && unit < num_units;
      if (!fn(Position{unit, has_unit, pair})) return false;
    }
    return true;
  }

  template <int kNumVectors>
  PYCOLL_DEVICE bool receive(const Position& position, Vector16 (&wire)[kNumVectors],
                             int num_vectors) const {
    const uint64_t flag = signal_value(signals_.epoch(), num_received_ + 1);
#pragma unroll
    for (int v = 0; v < kNumVectors; ++v) {
      if (v >= num_vectors) continue;
      if (!receive_pair(vector_in(own_, num_received_, v, position), flag, wire[v])) return false;
    }
    return true;
  }

  template <int kNumVectors>
  PYCOLL_DEVICE void send(const Position& position, const Vector16 (&wire)[kNumVectors],
                          int num_vectors) const {
    const uint64_t flag = signal_value(signals_.epoch(), num_sent_ + 1);
#pragma unroll
    for (int v = 0; v < kNumVectors; ++v)
      if (v < num_vectors) send_pair(vector_in(next_, num_sent_, v, position), flag, wire[v]);
  }

  PYCOLL_DEVICE bool end_step(bool receives, bool sends, bool goes_on) {
    if (!block_.all(goes_on)) return false;
    num_sent_ += sends;
    num_received_ += receives;
    if (receives && block_.thread_rank() == 0) signals_.post_free(num_received_);
    return true;
  }

 private:
  static constexpr int kLanes = 16;
  static constexpr int kSplitUnit = 14;
  static constexpr int kLowLane = 7;
  static constexpr int kHighLane = 15;

  static PYCOLL_DEVICE int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  static PYCOLL_DEVICE uint32_t mask() {
    return 0xffffu << (threadIdx.x % kWarpThreads / kLanes * kLanes);
  }
  static PYCOLL_DEVICE bool holds_flag() { return lane() % 8 == 7; }
  static PYCOLL_DEVICE int unit_of_lane() {
    if (lane() == kLowLane) return kSplitUnit;
    return lane() < kLowLane ? lane() : lane() - 1 + static_cast<int>(lane() == kHighLane);
  }
  static PYCOLL_DEVICE uint64_t from_lane(uint64_t value, int source) {
    return __shfl_sync(mask(), value,
                       static_cast<int>(threadIdx.x) % kWarpThreads / kLanes * kLanes + source);
  }

  static PYCOLL_DEVICE uint64_t low_half(const Vector16& v) {
    return v.word[0] | uint64_t{v.word[1]} << 32;
  }
  static PYCOLL_DEVICE uint64_t high_half(const Vector16& v) {
    return v.word[2] | uint64_t{v.word[3]} << 32;
  }
  static PYCOLL_DEVICE Vector16 join(uint64_t low, uint64_t high) {
    return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
             static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)}};
  }

  static PYCOLL_DEVICE void send_pair(Vector16* at, uint64_t flag, const Vector16& unit) {
    const uint64_t split_high = from_lane(high_half(unit), kLowLane);
    const uint64_t low = lane() == kHighLane ? split_high : low_half(unit);
    peer::store_line(at, join(low, holds_flag() ? flag : high_half(unit)));
  }

  PYCOLL_DEVICE bool receive_pair(const Vector16* at, uint64_t flag, Vector16& unit) const {
    BoundedSpin spin(signals_.watch(), Phase::kRingReceive, flag);
    Vector16 part;
    for (;;) {
      part = peer::load_line(at);
      const uint64_t seen = high_half(part);
      if (__all_sync(mask(), !holds_flag() || seen == flag)) break;
      const bool goes_on = spin.again(signals_.previous(), from_lane(seen, kLowLane));
      if (!__all_sync(mask(), goes_on)) return false;
    }
    const uint64_t split_high = from_lane(low_half(part), kHighLane);
    unit = lane() == kLowLane ? join(low_half(part), split_high) : part;
    return true;
  }

  PYCOLL_DEVICE Vector16* slots_of_block(void* slots) const {
    return static_cast<Vector16*>(slots) +
           static_cast<size_t>(block_index()) * kRingSlots * slot_vectors_;
  }
  // This lane's part of a line.
  PYCOLL_DEVICE Vector16* vector_in(Vector16* slots, uint32_t step, int v,
                                    const Position& position) const {
    const size_t pair = static_cast<size_t>(v) * line_pairs_ + position.line_pair;
    return slots + step % kRingSlots * slot_vectors_ + pair * kLanes + lane();
  }

  const BlockGroup& block_;
  const RingSignals signals_;
  const size_t line_pairs_;
  const size_t slot_vectors_;
  Vector16* const own_;
  Vector16* const next_;
  uint32_t num_sent_ = 0;
  uint32_t num_received_ = 0;
};

}  // namespace pycoll::cuda
