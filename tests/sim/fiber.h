// Fibers: functions with stacks of their own that a scheduler enters and that leave in the middle. Sanitizers are told of every
// change of stack.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace pycoll::sim {

// Address space for one stack, with a page below it that faults.
class Stack {
 public:
  Stack();
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  static constexpr size_t kBytes = size_t{128} << 10;
  std::byte* bottom() const { return bottom_; }
  std::byte* top() const { return bottom_ + kBytes; }

 private:
  std::byte* bottom_;
};

// Stacks that fibers have left. Race detectors would take what two fibers write to the same stack for a race, so there a stack
// is used once.
class StackPool {
 public:
  std::unique_ptr<Stack> take();
  void give_back(std::unique_ptr<Stack> stack);

 private:
  std::vector<std::unique_ptr<Stack>> free_;
};

class Fiber {
 public:
  // `entry(argument)` is called by the first enter(), and must end with leave_for_good().
  Fiber(std::unique_ptr<Stack> stack, void (*entry)(void*), void* argument);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void enter();  // by the scheduler: until the fiber leaves
  void leave();  // by the fiber: until it is entered again
  [[noreturn]] void leave_for_good();
  // By the scheduler: what the fiber has done up to now happens before what is done after acquire(tag).
  void release(void* tag);

  std::unique_ptr<Stack> release_stack() { return std::move(stack_); }

 private:
  static void start(Fiber* fiber);

  std::unique_ptr<Stack> stack_;
  void (*const entry_)(void*);
  void* const argument_;
#if defined(__x86_64__)
  void* fiber_sp_ = nullptr;
  void* scheduler_sp_ = nullptr;
#else
  ucontext_t fiber_context_, scheduler_context_;
#endif
  // For ThreadSanitizer.
  void* fiber_handle_ = nullptr;
  void* scheduler_handle_ = nullptr;
  // For AddressSanitizer.
  void* fiber_fake_stack_ = nullptr;
  void* scheduler_fake_stack_ = nullptr;
  const void* scheduler_bottom_ = nullptr;
  size_t scheduler_bytes_ = 0;
};

}  // namespace pycoll::sim
