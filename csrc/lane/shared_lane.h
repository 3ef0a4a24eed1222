// Lanes in the sender's segment.
#pragma once

#include <atomic>
#include <memory>

#include "lane/lane.h"
#include "memory/endpoint.h"

namespace pycoll {

struct LaneHeader {
  alignas(64) std::atomic<uint64_t> tail;  // slots filled; written by the sender
  alignas(64) std::atomic<uint64_t> head;  // slots freed; written by the receiver
  alignas(64) uint64_t num_slots;
  uint64_t slot_bytes;

  static size_t region_bytes(size_t num_slots, size_t slot_bytes) {
    return sizeof(LaneHeader) + num_slots * slot_bytes;
  }
  std::byte* slot(uint64_t index) {
    return reinterpret_cast<std::byte*>(this + 1) + (index % num_slots) * slot_bytes;
  }
};

class SharedSendLane final : public SendLane {
 public:
  // A new lane to `receiver`, in a region of `endpoint`.
  SharedSendLane(Endpoint* endpoint, int receiver_rank, Bell* receiver, size_t num_slots,
                 size_t slot_bytes);

  const Region& region() const { return region_; }
  size_t slot_bytes() const override { return header_->slot_bytes; }
  Wait writable() const override;
  std::byte* slot() override { return header_->slot(tail_); }
  void commit() override;

 private:
  Region region_;
  LaneHeader* header_;
  const int receiver_rank_;
  Bell* receiver_;
  uint64_t tail_ = 0;
};

class SharedReceiveLane final : public ReceiveLane {
 public:
  // The lane that lies at `offset` of the sender's segment. Raises kSystem if that cannot be a lane.
  SharedReceiveLane(const Segment& segment, size_t offset, int sender_rank, Bell* sender);

  size_t slot_bytes() const override { return slot_bytes_; }
  Wait readable() const override { return Wait{&header_->tail, head_ + 1, sender_rank_}; }
  const std::byte* slot() override { return header_->slot(head_); }
  void release() override;

 private:
  LaneHeader* header_;
  size_t slot_bytes_;
  const int sender_rank_;
  Bell* sender_;
  uint64_t head_ = 0;
};

}  // namespace pycoll
