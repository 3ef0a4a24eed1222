// One operation from its submission to its end.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "base/events.h"

namespace pycoll {

class Operation {
 public:
  explicit Operation(std::chrono::milliseconds timeout)
      : timeout_(timeout), deadline_(Deadline::after(timeout)) {
    event.queued_ns = now_ns();
    event.timeout_ms = timeout.count();
  }
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  Event event;  // of the thread that drives the operation

  std::chrono::milliseconds timeout() const { return timeout_; }
  Deadline deadline() const { return deadline_; }

  // Ended, well or not, and its callbacks have run.
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  // Of an ended operation: what went wrong, or null.
  std::exception_ptr error() const { return error_; }

  // `callback` runs once, on the thread that ends the operation, under its locks. False, and it never runs, if the end has
  // begun already.
  bool add_callback(std::function<void()> callback) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ending_) return false;
    callbacks_.push_back(std::move(callback));
    return true;
  }

  // By the thread that drives it, once.
  void finish(std::exception_ptr error) {
    std::vector<std::function<void()>> callbacks;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = std::move(error);
      ending_ = true;
      callbacks.swap(callbacks_);
    }
    event.ended_ns = now_ns();
    event.failed = error_ != nullptr;
    for (const auto& callback : callbacks) callback();
    // A post: who ends an operation rings sleepers next, and must not miss one that looked just before.
    finished_.store(true, std::memory_order_seq_cst);
  }

 private:
  const std::chrono::milliseconds timeout_;
  const Deadline deadline_;
  std::mutex mutex_;
  bool ending_ = false;
  std::vector<std::function<void()>> callbacks_;
  std::exception_ptr error_;
  std::atomic<bool> finished_{false};
};

}  // namespace pycoll
