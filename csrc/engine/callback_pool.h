// Threads that run what programs hang on the end of an operation: never the thread that drives operations, and without its
// locks, so that a callback may itself start operations and wait for them.
#pragma once

#include <functional>
#include <memory>

#include "base/clock.h"

namespace pycoll {

class CallbackPool {
 public:
  CallbackPool();
  // What has not begun is not run. Does not wait for what has.
  ~CallbackPool();
  CallbackPool(const CallbackPool&) = delete;
  CallbackPool& operator=(const CallbackPool&) = delete;

  // From any thread. Callbacks begin in the order in which they were submitted, one after the other; the next one begins
  // before the end of one that takes longer than a moment, since it may be waiting for just that.
  void submit(std::function<void()> callback);
  // Until all that was submitted has run, or (false) the deadline is over. Not from within a callback.
  bool drain(Deadline deadline);

 private:
  struct State;  // outlives the pool while a callback runs
  static void loop(const std::shared_ptr<State>& state);
  static void ensure_spare(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
};

}  // namespace pycoll
