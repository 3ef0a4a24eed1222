#include "bootstrap/thread_exchange.h"

#include "base/error.h"

namespace pycoll {

std::vector<Blob> ThreadExchange::all_gather(const Blob& mine, Deadline deadline,
                                             const InterruptCheck& interrupt) {
  ThreadRendezvous& place = *rendezvous_;
  const size_t turn = turn_++;
  std::unique_lock<std::mutex> lock(place.mutex_);
  if (place.turns_.size() <= turn) {
    place.turns_.resize(turn + 1, std::vector<Blob>(static_cast<size_t>(place.world_size_)));
    place.given_.resize(turn + 1, 0);
  }
  place.turns_[turn][static_cast<size_t>(rank_)] = mine;
  if (++place.given_[turn] == place.world_size_) place.arrived_.notify_all();
  while (place.given_[turn] < place.world_size_) {
    place.arrived_.wait_for(lock, deadline.left(std::chrono::milliseconds(50)));
    if (interrupt) interrupt();
    if (place.given_[turn] < place.world_size_ && deadline.passed()) {
      fail(ErrorKind::kTimeout, "rank ", rank_, " timed out making a group of ", place.world_size_,
           ": Timed out, ", place.given_[turn], " ranks came");
    }
  }
  return place.turns_[turn];
}

bool ThreadExchange::peek(int rank, Blob* blob) {
  std::lock_guard<std::mutex> lock(rendezvous_->mutex_);
  if (rendezvous_->turns_.size() <= turn_) return false;
  *blob = rendezvous_->turns_[turn_][static_cast<size_t>(rank)];
  return !blob->empty();
}

}  // namespace pycoll
