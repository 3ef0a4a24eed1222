// A queue of operations that some thread has to push on: whoever waits for one of them, else the progress engine.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "base/task.h"

namespace pycoll {

class Driver {
 public:
  virtual ~Driver() = default;

  // All three under `mutex`; none of them sleeps.
  // Goes on with every operation that can, and ends those that are complete.
  virtual void progress() = 0;
  // Ends operations whose deadline is over or whose peers have failed.
  virtual void check() = 0;
  // What has to arrive before progress() has anything to do; false when there is no operation.
  virtual bool watch(std::vector<Wait>* waits) const = 0;

  std::mutex mutex;
  // Threads inside wait(): while there are any, they drive, and the progress engine keeps out.
  std::atomic<int> waiters{0};
  // The progress engine has let go of this driver because somebody waits: the waiter that leaves gives it back.
  std::atomic<bool> left_to_waiters{false};
};

inline bool any_ready(const std::vector<Wait>& waits) {
  for (const Wait& wait : waits) {
    if (wait.ready()) return true;
  }
  return false;
}

}  // namespace pycoll
