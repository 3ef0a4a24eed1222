// Simple: lanes of a ring whose slots hold plain data. A signal says that a slot is full, another that it is free.
//
// Thread 0 waits for signals and posts them, between barriers of the block; all threads move data. Tail: the sender's number of
// steps, written in the receiver's memory with a release after the data. Head: the receiver's, written in the sender's memory with a
// release after the last load; the acquire of it orders the loads before the stores that overwrite them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/meeting.cuh"
#include "kernels/cuda/peer_access.cuh"
#include "kernels/cuda/signals.cuh"
#include "kernels/cuda/thread_group.cuh"
#include "topology/ring.h"

namespace pycoll::cuda {

// The signals of a block's two lanes, whatever the slots hold.
class RingSignals {
 public:
  PYCOLL_DEVICE RingSignals(const Group& group, const RingStaging& staging, uint32_t epoch)
      : watch_(group.watch),
        previous_(ring::previous(group.rank, group.world_size)),
        next_(ring::next(group.rank, group.world_size)),
        epoch_(epoch),
        tail_(staging.signals + tail_index()),
        tail_of_next_(staging.signals_of_next + tail_index()),
        head_(staging.signals + head_index()),
        head_of_previous_(staging.signals_of_previous + head_index()) {}

  PYCOLL_DEVICE bool wait_full(uint32_t num_sent_by_previous) const {
    return wait_reached(tail_, signal_value(epoch_, num_sent_by_previous), Phase::kRingReceive,
                        previous_, watch_);
  }
  // Until slot `num_sent` mod kRingSlots of the next rank is free: at once, for the first kRingSlots.
  PYCOLL_DEVICE bool wait_free(uint32_t num_sent) const {
    return num_sent < kRingSlots ||
           wait_reached(head_, signal_value(epoch_, num_sent - kRingSlots + 1), Phase::kRingSend,
                        next_, watch_);
  }
  PYCOLL_DEVICE void post_full(uint32_t num_sent) const {
    peer::store_release(tail_of_next_, signal_value(epoch_, num_sent));
  }
  PYCOLL_DEVICE void post_free(uint32_t num_received) const {
    peer::store_release(head_of_previous_, signal_value(epoch_, num_received));
  }

  PYCOLL_DEVICE const Watch& watch() const { return watch_; }
  PYCOLL_DEVICE int previous() const { return previous_; }
  PYCOLL_DEVICE uint32_t epoch() const { return epoch_; }

 private:
  static PYCOLL_DEVICE int tail_index() { return block_index(); }
  static PYCOLL_DEVICE int head_index() { return kMaxBlocks + block_index(); }

  const Watch& watch_;
  const int previous_, next_;
  const uint32_t epoch_;
  const uint64_t* const tail_;
  uint64_t* const tail_of_next_;
  const uint64_t* const head_;
  uint64_t* const head_of_previous_;
};

// What lanes offer to a ring (ring.cuh): begin_step(receives, sends); for_each_unit(n, f) with f(Position) -> bool;
// receive and send of a position's vectors; end_step.
class SimpleLanes {
 public:
  struct Position {
    size_t unit;  // of the segment
    bool has_unit;
  };

  PYCOLL_DEVICE SimpleLanes(const Group& group, const RingStaging& staging, const BlockGroup& block,
                            uint32_t epoch)
      : block_(block),
        signals_(group, staging, epoch),
        slot_units_(staging.slot_units),
        own_(slots_of_block(staging.slots, staging.slot_units)),
        next_(slots_of_block(staging.slots_of_next, staging.slot_units)) {}

  PYCOLL_DEVICE bool begin_step(bool receives, bool sends) {
    bool goes_on = true;
    if (block_.thread_rank() == 0) {
      if (receives) goes_on = signals_.wait_full(num_received_ + 1);
      if (sends) goes_on = goes_on && signals_.wait_free(num_sent_);
    }
    return block_.all(goes_on);
  }

  template <class Fn>
  PYCOLL_DEVICE bool for_each_unit(size_t num_units, Fn fn) const {
    const Share share = share_of_thread(block_);
    for (size_t unit = share.first; unit < num_units; unit += share.stride)
      fn(Position{unit, true});
    return true;
  }

  template <int kNumVectors>
  PYCOLL_DEVICE bool receive(const Position& position, Vector16 (&wire)[kNumVectors],
                             int num_vectors) const {
    const Vector16* const slot = slot_in(own_, num_received_);
#pragma unroll
    for (int v = 0; v < kNumVectors; ++v)
      if (v < num_vectors)
        wire[v] = peer::load_plain(slot + static_cast<size_t>(v) * slot_units_ + position.unit);
    return true;
  }

  template <int kNumVectors>
  PYCOLL_DEVICE void send(const Position& position, const Vector16 (&wire)[kNumVectors],
                          int num_vectors) const {
    Vector16* const slot = slot_in(next_, num_sent_);
#pragma unroll
    for (int v = 0; v < kNumVectors; ++v)
      if (v < num_vectors)
        peer::store_plain(slot + static_cast<size_t>(v) * slot_units_ + position.unit, wire[v]);
  }

  PYCOLL_DEVICE bool end_step(bool receives, bool sends, bool goes_on) {
    block_.sync();
    num_sent_ += sends;
    num_received_ += receives;
    if (block_.thread_rank() == 0) {
      if (sends) signals_.post_full(num_sent_);
      if (receives) signals_.post_free(num_received_);
    }
    return goes_on;
  }

 private:
  static PYCOLL_DEVICE Vector16* slots_of_block(void* slots, size_t slot_units) {
    return static_cast<Vector16*>(slots) + static_cast<size_t>(block_index()) * kRingSlots *
                                               ring_slot_vectors(Protocol::kSimple, slot_units);
  }
  PYCOLL_DEVICE Vector16* slot_in(Vector16* slots, uint32_t step) const {
    return slots + step % kRingSlots * ring_slot_vectors(Protocol::kSimple, slot_units_);
  }

  const BlockGroup& block_;
  const RingSignals signals_;
  const size_t slot_units_;
  Vector16* const own_;
  Vector16* const next_;
  uint32_t num_sent_ = 0;
  uint32_t num_received_ = 0;
};

}  // namespace pycoll::cuda
