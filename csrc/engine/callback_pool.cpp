#include "engine/callback_pool.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/log.h"
#include "base/process.h"

namespace pycoll {
namespace {

using Clock = std::chrono::steady_clock;

// How long a callback may run before it is taken for one that waits.
constexpr std::chrono::milliseconds kPatience{1};
// Idle threads beyond this number end.
constexpr int kMostIdle = 2;

struct Queued {
  std::function<void()> callback;
  Clock::time_point since;
};

}  // namespace

struct CallbackPool::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Queued> queue;
  int idle = 0;
  int running = 0;
  bool stopping = false;
};

CallbackPool::CallbackPool() : state_(std::make_shared<State>()) {}

CallbackPool::~CallbackPool() {
  std::deque<Queued> dropped;  // outside the lock: what callbacks hold may do anything when it goes
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->stopping = true;
  dropped.swap(state_->queue);
  state_->changed.notify_all();
}

void CallbackPool::submit(std::function<void()> callback) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->queue.push_back({std::move(callback), Clock::now()});
  ensure_spare(state_);
  state_->changed.notify_one();
}

bool CallbackPool::drain(Deadline deadline) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  const auto done = [&] { return state_->queue.empty() && state_->running == 0; };
  while (!done()) {
    if (deadline.passed()) return false;
    state_->changed.wait_for(lock, kPatience, done);
  }
  return true;
}

// Under the lock. There is always a thread that does not run a callback, to take the next one.
void CallbackPool::ensure_spare(const std::shared_ptr<State>& state) {
  if (state->idle > 0 || state->stopping) return;
  try {
    std::thread([state] { loop(state); }).detach();
    ++state->idle;
  } catch (const std::system_error& error) {
    PYCOLL_LOG(LogLevel::kWarn, "cannot start a thread for callbacks: ", error.what(),
               "; they run when somebody waits, or when another one has ended");
  }
}

void CallbackPool::loop(const std::shared_ptr<State>& state) {
  block_signals();
  pthread_setname_np(pthread_self(), "pycoll-callback");
  std::unique_lock<std::mutex> lock(state->mutex);
  while (!state->stopping) {
    if (state->queue.empty()) {
      if (state->idle > kMostIdle) break;
      state->changed.wait(lock);
      continue;
    }
    const Clock::time_point turn = state->queue.front().since + kPatience;
    if (state->running > 0 && Clock::now() < turn) {
      state->changed.wait_until(lock, turn);
      continue;
    }
    std::function<void()> callback = std::move(state->queue.front().callback);
    state->queue.pop_front();
    // Those behind it have waited for it, not for this one.
    if (!state->queue.empty()) state->queue.front().since = Clock::now();
    --state->idle;
    ++state->running;
    ensure_spare(state);
    lock.unlock();
    callback();
    callback = nullptr;
    lock.lock();
    --state->running;
    ++state->idle;
    state->changed.notify_all();
  }
  --state->idle;
}

}  // namespace pycoll
