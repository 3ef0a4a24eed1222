#include "lane/shared_lane.h"

#include <cstring>

namespace pycoll {

SharedSendLane::SharedSendLane(Endpoint* endpoint, int receiver_rank, Bell* receiver,
                               size_t num_slots, size_t slot_bytes)
    : receiver_rank_(receiver_rank), receiver_(receiver) {
  PYCOLL_CHECK(slot_bytes % 64 == 0 && num_slots > 0);
  region_ = endpoint->arena().allocate(LaneHeader::region_bytes(num_slots, slot_bytes));
  std::byte* memory = endpoint->arena().address(region_);
  std::memset(memory, 0, sizeof(LaneHeader));
  header_ = reinterpret_cast<LaneHeader*>(memory);
  header_->num_slots = num_slots;
  header_->slot_bytes = slot_bytes;
}

Wait SharedSendLane::writable() const {
  const uint64_t needed = tail_ < header_->num_slots ? 0 : tail_ - header_->num_slots + 1;
  return Wait{&header_->head, needed, receiver_rank_};
}

void SharedSendLane::commit() {
  header_->tail.store(++tail_, std::memory_order_seq_cst);
  receiver_->ring_sleepers();
}

SharedReceiveLane::SharedReceiveLane(const Segment& segment, size_t offset, int sender_rank,
                                     Bell* sender)
    : sender_rank_(sender_rank), sender_(sender) {
  const auto fits = [&](size_t nbytes) {
    return nbytes <= segment.reserved() && offset <= segment.reserved() - nbytes;
  };
  header_ = reinterpret_cast<LaneHeader*>(segment.base() + offset);
  if (offset % 64 != 0 || !fits(sizeof(LaneHeader)) || header_->num_slots == 0 ||
      header_->slot_bytes == 0 || header_->slot_bytes > segment.reserved() ||
      header_->num_slots > segment.reserved() / header_->slot_bytes ||
      !fits(LaneHeader::region_bytes(header_->num_slots, header_->slot_bytes))) {
    fail(ErrorKind::kSystem, "what rank ", sender_rank,
         " offers as a lane lies outside its segment");
  }
  slot_bytes_ = header_->slot_bytes;
}

void SharedReceiveLane::release() {
  header_->head.store(++head_, std::memory_order_seq_cst);
  sender_->ring_sleepers();
}

}  // namespace pycoll
