#include "engine/signal_pads.h"

namespace pycoll {

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
}

// Waits until the word is `from`, and makes it `to`.
void SignalPads::exchange(std::atomic_ref<uint32_t> word, uint32_t from, uint32_t to, int peer,
                          int channel, const char* what, Deadline deadline) const {
  // A waiter may look once more after it has succeeded.
  bool done = false;
  const auto taken = [&] {
    uint32_t expected = from;
    done = done || word.compare_exchange_strong(expected, to, std::memory_order_seq_cst);
    return done;
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
  Bell* bell = peer == communicator_->rank() ? group.endpoint().bell() : group.member(peer).bell;
  bell->ring_sleepers();
}

void SignalPads::put_until(int dst, int channel, Deadline deadline) const {
  exchange(word(dst, channel, communicator_->rank()), 0, 1, dst, channel,
           "the earlier signal to be taken: that", deadline);
}

void SignalPads::wait_until(int src, int channel, Deadline deadline) const {
  exchange(word(communicator_->rank(), channel, src), 1, 0, src, channel, "the signal", deadline);
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
  const Deadline deadline = Deadline::after(timeout);
  const int world_size = static_cast<int>(pads_.size());
  for (int r = 0; r < world_size; ++r) {
    if (r != communicator_->rank()) put_until(r, channel, deadline);
  }
  for (int r = 0; r < world_size; ++r) {
    if (r != communicator_->rank()) wait_until(r, channel, deadline);
  }
}

}  // namespace pycoll
