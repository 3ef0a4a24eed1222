#include "engine/signal_pads.h"

namespace pycoll {
namespace {

// In all words that a rank has of a channel, once a barrier has failed there.
constexpr uint32_t kBroken = 2;

[[noreturn]] void fail_broken(int channel, int rank) {
  fail(ErrorKind::kAborted, "channel ", channel,
       " of this symmetric memory is broken: a barrier on it failed on rank ", rank,
       ", and its signals may be left over; use another channel, or rendezvous with a new tensor");
}

}  // namespace

SignalPads::SignalPads(std::shared_ptr<Communicator> communicator, std::vector<void*> pads,
                       size_t nbytes)
    : communicator_(std::move(communicator)), pads_(std::move(pads)), nbytes_(nbytes) {}

std::atomic_ref<uint32_t> SignalPads::word(int at, int channel, int from) const {
  const size_t index = static_cast<size_t>(channel) * pads_.size() + static_cast<size_t>(from);
  return std::atomic_ref<uint32_t>(static_cast<uint32_t*>(pads_[static_cast<size_t>(at)])[index]);
}

void SignalPads::check(const char* argument, int rank, int channel) const {
  const int world_size = static_cast<int>(pads_.size());
  const size_t num_channels = nbytes_ / sizeof(uint32_t) / pads_.size();
  PYCOLL_CHECK_ARG(rank >= 0 && rank < world_size, argument, " is ", rank,
                   ", but the group has the ranks 0 to ", world_size - 1);
  PYCOLL_CHECK_ARG(channel >= 0 && static_cast<size_t>(channel) < num_channels, "channel is ",
                   channel, ", but signal pads of ", nbytes_, " bytes for ", world_size,
                   " ranks have the channels 0 to ", num_channels - 1,
                   "; see torch.distributed._symmetric_memory.set_signal_pad_size");
  if (communicator_->forked()) communicator_->check_open();
  const int self = communicator_->rank();
  if (word(self, channel, self).load(std::memory_order_relaxed) == kBroken) {
    fail_broken(channel, self);
  }
}

// Waits until the word of `sender` at `owner` is `from`, and makes it `to`.
void SignalPads::exchange(int owner, int sender, uint32_t from, uint32_t to, int channel,
                          const char* what, Deadline deadline) const {
  const auto signal = word(owner, channel, sender);
  const int peer = owner == communicator_->rank() ? sender : owner;
  // A waiter may look once more after it has succeeded.
  bool done = false, broken = false;
  const auto taken = [&] {
    uint32_t expected = from;
    done = done || signal.compare_exchange_strong(expected, to, std::memory_order_seq_cst);
    broken = !done && expected == kBroken;
    return done || broken;
  };
  if (communicator_->group() == nullptr) {
    if (!taken()) fail(ErrorKind::kTimeout, "the only rank of a group waits for its own ", what);
    return;
  }
  const Group& group = *communicator_->group();
  while (!wait_slice(taken, group.endpoint().bell(), communicator_->spin(), deadline)) {
    if (communicator_->interrupt()) communicator_->interrupt()();
    if (peer != communicator_->rank()) group.check_member(peer);
    group.check_usable();
    if (deadline.passed()) {
      fail(ErrorKind::kTimeout, "rank ", communicator_->rank(),
           " timed out in symmetric memory: Timed out waiting for ", what, " of rank ", peer,
           " on channel ", channel);
    }
  }
  if (broken) fail_broken(channel, owner);
  Bell* bell = peer == communicator_->rank() ? group.endpoint().bell() : group.member(peer).bell;
  bell->ring_sleepers();
}

void SignalPads::put_until(int dst, int channel, Deadline deadline) const {
  exchange(dst, communicator_->rank(), 0, 1, channel, "the earlier signal to be taken: that",
           deadline);
}

void SignalPads::wait_until(int src, int channel, Deadline deadline) const {
  exchange(communicator_->rank(), src, 1, 0, channel, "the signal", deadline);
}

void SignalPads::put(int dst, int channel, std::chrono::milliseconds timeout) const {
  check("dst_rank", dst, channel);
  put_until(dst, channel, Deadline::after(timeout));
}

void SignalPads::wait(int src, int channel, std::chrono::milliseconds timeout) const {
  check("src_rank", src, channel);
  wait_until(src, channel, Deadline::after(timeout));
}

void SignalPads::barrier(int channel, std::chrono::milliseconds timeout) const {
  check("rank", communicator_->rank(), channel);
  try {
    meet(channel, Deadline::after(timeout));
  } catch (...) {
    break_channel(channel);
    throw;
  }
}

void SignalPads::meet(int channel, Deadline deadline) const {
  const int world_size = static_cast<int>(pads_.size());
  for (int r = 0; r < world_size; ++r) {
    if (r != communicator_->rank()) put_until(r, channel, deadline);
  }
  for (int r = 0; r < world_size; ++r) {
    if (r != communicator_->rank()) wait_until(r, channel, deadline);
  }
}

// In this rank's own pad only: a peer may have given its memory back by now.
void SignalPads::break_channel(int channel) const {
  const int self = communicator_->rank();
  const int world_size = static_cast<int>(pads_.size());
  for (int r = 0; r < world_size; ++r) word(self, channel, r).store(kBroken);
  if (communicator_->group() == nullptr) return;
  for (int r = 0; r < world_size; ++r) {
    if (r != self) communicator_->group()->member(r).bell->ring_sleepers();
  }
}

}  // namespace pycoll
