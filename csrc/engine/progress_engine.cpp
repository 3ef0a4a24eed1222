#include "engine/progress_engine.h"

#include <pthread.h>

#include <algorithm>
#include <system_error>

#include "base/error.h"
#include "base/process.h"
#include "sync/waiter.h"

namespace pycoll {
void ProgressEngine::activate(const std::shared_ptr<Driver>& driver) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(active_.begin(), active_.end(), driver) == active_.end()) active_.push_back(driver);
  if (!thread_.joinable() && !stopping_) start_thread();
  news_.store(true, std::memory_order_seq_cst);
  changed_.notify_all();
  endpoint_->bell()->ring_sleepers();
}

void ProgressEngine::start_thread() {
  try {
    thread_ = std::thread([this] { loop(); });
  } catch (const std::system_error& error) {
    active_.clear();
    fail(ErrorKind::kSystem, "cannot start the thread that drives operations: ", error.what(),
         "; raise the limit of processes and threads (ulimit -u, or the container's)");
  }
}

void ProgressEngine::remove(const Driver* driver) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_it = [driver](const std::shared_ptr<Driver>& d) { return d.get() == driver; };
  active_.erase(std::remove_if(active_.begin(), active_.end(), is_it), active_.end());
  changed_.wait(lock, [&] { return driving_ != driver; });
}

void ProgressEngine::stop() {
  if (endpoint_->forked()) {  // the parent's thread: neither it nor a usable lock exists here
    if (thread_.joinable()) thread_.detach();
    return;
  }
  std::thread thread;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    thread.swap(thread_);
    news_.store(true, std::memory_order_seq_cst);
    changed_.notify_all();
    endpoint_->bell()->ring_sleepers();
  }
  if (thread.joinable()) thread.join();
  std::lock_guard<std::mutex> lock(mutex_);
  stopping_ = false;
}

void ProgressEngine::loop() {
  block_signals();
  pthread_setname_np(pthread_self(), "pycoll");
  std::vector<Wait> waits;
  std::unique_lock<std::mutex> lock(mutex_);
  int64_t checked_ns = now_ns();
  while (!stopping_) {
    news_.store(false, std::memory_order_seq_cst);
    const bool check = now_ns() - checked_ns > 2 * kSleepSlice / std::chrono::nanoseconds(1);
    if (check) checked_ns = now_ns();
    waits.clear();
    // Drivers that were activated meanwhile set news_, and this starts again.
    const std::vector<std::shared_ptr<Driver>> drivers = active_;
    for (const std::shared_ptr<Driver>& driver : drivers) {
      if (std::find(active_.begin(), active_.end(), driver) == active_.end()) continue;  // removed
      bool keep = false;
      driving_ = driver.get();
      lock.unlock();
      if (driver->waiters.load(std::memory_order_acquire) == 0) {
        std::unique_lock<std::mutex> driver_lock(driver->mutex);
        driver->progress();
        if (check) driver->check();
        keep = driver->watch(&waits);
        driver_lock.unlock();
        driver->report_failure();
      } else {
        driver->left_to_waiters.store(true, std::memory_order_seq_cst);
        // The last one may have left before it could see this.
        if (driver->waiters.load(std::memory_order_seq_cst) == 0) news_.store(true);
      }
      lock.lock();
      driving_ = nullptr;
      changed_.notify_all();
      // A driver that somebody waits on comes back through activate() when the last waiter leaves.
      const auto it = std::find(active_.begin(), active_.end(), driver);
      if (!keep && it != active_.end() && !news_.load(std::memory_order_relaxed)) active_.erase(it);
    }
    if (stopping_ || news_.load(std::memory_order_relaxed)) continue;
    if (active_.empty()) {
      changed_.wait(lock, [&] { return stopping_ || !active_.empty(); });
      continue;
    }
    lock.unlock();
    // No spinning: the program's own threads need the cores.
    wait_slice([&] { return news_.load(std::memory_order_acquire) || any_ready(waits); },
               endpoint_->bell(), SpinPolicy{}, Deadline::never());
    lock.lock();
  }
}

}  // namespace pycoll
