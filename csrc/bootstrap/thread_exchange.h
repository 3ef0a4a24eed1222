// Ranks that are threads of one process.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include "bootstrap/exchange.h"

namespace pycoll {

// The meeting place of the threads of one group; each makes its own ThreadExchange on it.
class ThreadRendezvous {
 public:
  explicit ThreadRendezvous(int world_size) : world_size_(world_size) {}

 private:
  friend class ThreadExchange;
  const int world_size_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<std::vector<Blob>> turns_;  // [turn][rank]
  std::vector<int> given_;                // [turn]
};

class ThreadExchange final : public Exchange {
 public:
  ThreadExchange(std::shared_ptr<ThreadRendezvous> rendezvous, int rank)
      : rendezvous_(std::move(rendezvous)), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return rendezvous_->world_size_; }
  std::vector<Blob> all_gather(const Blob& mine, Deadline deadline,
                               const InterruptCheck& interrupt) override;
  bool peek(int rank, Blob* blob) override;

 private:
  std::shared_ptr<ThreadRendezvous> rendezvous_;
  const int rank_;
  size_t turn_ = 0;
};

}  // namespace pycoll
