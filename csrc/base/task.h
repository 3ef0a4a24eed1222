// Resumable operations: a coroutine that suspends where it has to wait for a signal.
//
// An algorithm is written as straight-line code; `co_await signal_reached(...)` gives the thread back when the signal is not
// there yet. Whoever drives the operation polls `Wait::ready()` and resumes. Tasks nest: awaiting a Task runs it, and
// what it waits for is what the whole operation waits for.
#pragma once

#include <atomic>
#include <coroutine>
#include <cstdint>
#include <exception>
#include <utility>

namespace pycoll {

// What a suspended operation needs before it can go on: `*word >= target`, where `peer` is the rank that will raise it.
struct Wait {
  const std::atomic<uint64_t>* word = nullptr;
  uint64_t target = 0;
  int peer = -1;

  // Sequentially consistent, for the look that a thread takes after it has announced that it sleeps.
  bool ready() const { return word == nullptr || word->load(std::memory_order_seq_cst) >= target; }
};

// Shared by all tasks of one operation.
struct TaskState {
  std::coroutine_handle<> leaf;  // what to resume
  Wait wait;
};

class [[nodiscard]] Task {
 public:
  struct promise_type {
    TaskState* state = nullptr;
    std::coroutine_handle<> parent;
    std::exception_ptr error;

    Task get_return_object() {
      return Task(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept { return {}; }

    struct FinalAwaiter {
      bool await_ready() noexcept { return false; }
      std::coroutine_handle<> await_suspend(std::coroutine_handle<promise_type> self) noexcept {
        promise_type& promise = self.promise();
        if (!promise.parent) return std::noop_coroutine();
        promise.state->leaf = promise.parent;
        return promise.parent;
      }
      void await_resume() noexcept {}
    };
    FinalAwaiter final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }
  };
  using Handle = std::coroutine_handle<promise_type>;

  Task() = default;
  explicit Task(Handle handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      destroy();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  ~Task() { destroy(); }

  // The operation's outermost task: runs until its first wait.
  void start(TaskState* state) {
    handle_.promise().state = state;
    state->leaf = handle_;
    state->leaf.resume();
  }

  // Goes on after `state->wait` became ready.
  static void resume(TaskState* state) {
    state->wait = Wait{};
    state->leaf.resume();
  }

  bool done() const { return handle_ && handle_.done(); }
  void rethrow() const {
    if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
  }

  struct Awaiter {
    Handle child;
    bool await_ready() const noexcept { return false; }
    std::coroutine_handle<> await_suspend(Handle parent) noexcept {
      promise_type& promise = child.promise();
      promise.state = parent.promise().state;
      promise.parent = parent;
      promise.state->leaf = child;
      return child;
    }
    void await_resume() const {
      if (child.promise().error) std::rethrow_exception(child.promise().error);
    }
  };
  Awaiter operator co_await() const { return Awaiter{handle_}; }

 private:
  void destroy() {
    if (handle_) std::exchange(handle_, nullptr).destroy();
  }
  Handle handle_;
};

// `co_await` it to go on once `*word >= target`.
struct SignalReached {
  Wait wait;
  bool await_ready() const { return wait.ready(); }
  void await_suspend(Task::Handle self) const { self.promise().state->wait = wait; }
  void await_resume() const {}
};

}  // namespace pycoll
