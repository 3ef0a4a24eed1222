// The region that a rank owns in one group, and what each part of it is for. docs/memory_model.md, "Nouns".
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "topology/partition.h"

namespace pycoll {

enum class GroupState : uint32_t { kOpen = 0, kPoisoned, kClosed };

// A line beside whose signal the first bytes of the payload travel.
struct alignas(64) HandshakeLine {
  std::atomic<uint64_t> signal;
  uint64_t fingerprint[3];  // compared
  uint64_t detail;          // this rank's own: the factor of PREMUL_SUM
  std::byte payload[24];
};
static_assert(sizeof(HandshakeLine) == 64);

struct alignas(64) Counter {
  std::atomic<uint64_t> value;
};

struct GroupPage {
  static constexpr size_t kReasonBytes = 512;
  static constexpr size_t kTagBytes = 128;
  static constexpr int kHandshakeCounters = 2;
  static constexpr int kRoundCounters = 4;

  // Identity and state. Written by the owner.
  alignas(64)
      std::atomic<uint64_t> nonce;  // of the group; another value: this memory has been recycled
  std::atomic<uint32_t> state;      // GroupState
  uint32_t failure_kind;            // ErrorKind, written before `state`
  char reason[kReasonBytes];        // likewise

  // Written by the owner.
  alignas(64) std::atomic<uint64_t> round;
  std::atomic<uint64_t>
      staging_offset;              // in the owner's segment, before the operation's first round
  std::atomic<uint64_t> touching;  // not 0: the owner accesses tensors of others

  // Monitored barriers that the owner has reached; the only signal that may be taken back.
  alignas(64) std::atomic<uint64_t> monitored;

  // For messages only: the tag of the call in each handshake slot, empty where it has none. Written with the slot.
  char tags[2][kTagBytes];

  // Used in the page of rank 0 only. Written by all.
  Counter handshake_arrivals[kHandshakeCounters];
  Counter round_arrivals[kRoundCounters];

  // What follows the struct: two handshake slots, then two lane tables of one offset for each rank.
  static size_t slot_bytes(size_t payload_bytes) {
    return sizeof(HandshakeLine) + round_up(payload_bytes, 64);
  }
  static size_t page_bytes(size_t payload_bytes, int world_size) {
    return sizeof(GroupPage) + 2 * slot_bytes(payload_bytes) +
           2 * sizeof(std::atomic<uint64_t>) * static_cast<size_t>(world_size);
  }

  // A fresh page of `nbytes`. What peers of an earlier group may still look at is written atomically.
  void initialise(uint64_t new_nonce, size_t nbytes) {
    nonce.store(new_nonce, std::memory_order_relaxed);
    round.store(0, std::memory_order_relaxed);
    staging_offset.store(0, std::memory_order_relaxed);
    touching.store(0, std::memory_order_relaxed);
    monitored.store(0, std::memory_order_relaxed);
    for (Counter& counter : handshake_arrivals) counter.value.store(0, std::memory_order_relaxed);
    for (Counter& counter : round_arrivals) counter.value.store(0, std::memory_order_relaxed);
    failure_kind = 0;
    std::memset(reason, 0, sizeof(reason));
    std::memset(tags, 0, sizeof(tags));
    std::memset(tail(), 0, nbytes - sizeof(GroupPage));
    state.store(static_cast<uint32_t>(GroupState::kOpen), std::memory_order_release);
  }

  HandshakeLine* slot(uint64_t sequence, size_t payload_bytes) {
    return reinterpret_cast<HandshakeLine*>(tail() + (sequence % 2) * slot_bytes(payload_bytes));
  }

  // Where the lane to `peer` begins in the owner's segment; 0 until it has been made. Lanes of collectives and of sends apart.
  std::atomic<uint64_t>* collective_lane(int peer, size_t payload_bytes) {
    return reinterpret_cast<std::atomic<uint64_t>*>(tail() + 2 * slot_bytes(payload_bytes)) + peer;
  }
  std::atomic<uint64_t>* message_lane(int peer, size_t payload_bytes, int world_size) {
    return collective_lane(peer, payload_bytes) + world_size;
  }

  // Payload of up to 24 bytes sits in the signal's line, a larger one behind it.
  static std::byte* payload(HandshakeLine* line, size_t nbytes) {
    return nbytes <= sizeof(line->payload) ? line->payload : reinterpret_cast<std::byte*>(line + 1);
  }

 private:
  std::byte* tail() { return reinterpret_cast<std::byte*>(this + 1); }
};
static_assert(sizeof(GroupPage) % 64 == 0);

}  // namespace pycoll
