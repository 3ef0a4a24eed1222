// A queue of operations that some thread has to push on: whoever waits for one of them, else the progress engine.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

#include "base/events.h"
#include "base/task.h"

namespace pycoll {

class Driver {
 public:
  virtual ~Driver() = default;

  // All under `mutex`; none of them sleeps.
  // Goes on with every operation that can, and ends those that are complete.
  virtual void progress() = 0;
  // Ends operations whose deadline is over or whose peers have failed.
  virtual void check() = 0;
  // What has to arrive before progress() has anything to do; false when there is no operation.
  virtual bool watch(std::vector<Wait>* waits) const = 0;

  // Appends the events of operations that have not ended.
  virtual void pending_events(std::vector<Event>* events) const = 0;

  std::mutex mutex;
  // After `mutex` has been released: tells who wants to know that an operation has failed in a way that ends the group.
  void report_failure() {
    if (failed.exchange(false, std::memory_order_acq_rel) && on_failure) on_failure();
  }
  std::function<void()> on_failure;  // set before the first operation
  std::atomic<bool> failed{false};

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
