// Signals that a program sends itself over symmetric memory. docs/memory_model.md, "Signal pads".
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "engine/communicator.h"

namespace pycoll {

// One pad a rank: 32-bit words, one for each channel and sender, zero at rest. All methods raise kInvalidArgument for a rank or channel
// that does not exist, kTimeout, kAborted on a channel that a failed barrier has broken and in a forked child, and what the group's
// other waits raise when a peer dies.
class SignalPads {
 public:
  // pads[r]: of rank r, `nbytes` each, mapped here. `communicator` may be null in a group of one.
  SignalPads(std::shared_ptr<Communicator> communicator, std::vector<void*> pads, size_t nbytes);

  // Raises the signal of this rank at `dst`, once the one before has been taken.
  void put(int dst, int channel, std::chrono::milliseconds timeout) const;
  // Waits for the signal of `src` and takes it. What `src` wrote before it put it is visible then.
  void wait(int src, int channel, std::chrono::milliseconds timeout) const;
  // All ranks have come. A barrier that fails breaks the channel for this rank, and for those who signal to it there.
  void barrier(int channel, std::chrono::milliseconds timeout) const;

 private:
  std::atomic_ref<uint32_t> word(int at, int channel, int from) const;
  void check(const char* argument, int rank, int channel) const;
  void exchange(int owner, int sender, uint32_t from, uint32_t to, int channel, const char* what,
                Deadline deadline) const;
  void meet(int channel, Deadline deadline) const;
  void break_channel(int channel) const;
  void put_until(int dst, int channel, Deadline deadline) const;
  void wait_until(int src, int channel, Deadline deadline) const;

  const std::shared_ptr<Communicator> communicator_;
  const std::vector<void*> pads_;
  const size_t nbytes_;
};

}  // namespace pycoll
