#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "sanitizers.h"

#if defined(__SANITIZE_ADDRESS__)
// A run that fails leaves its fibers where they are, with what they own.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }
#endif

namespace pycoll::sim {

// ---- stacks

namespace {
size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
}  // namespace

Stack::Stack() {
  const size_t guard = page_bytes();
  void* const mapped = mmap(nullptr, guard + kBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED || mprotect(mapped, guard, PROT_NONE) != 0) {
    std::perror("simulator: a stack for a thread");
    std::abort();
  }
  bottom_ = static_cast<std::byte*>(mapped) + guard;
}

Stack::~Stack() {
  allow_access(bottom_, kBytes);
  munmap(bottom_ - page_bytes(), page_bytes() + kBytes);
}

std::unique_ptr<Stack> StackPool::take() {
  if (free_.empty()) return std::make_unique<Stack>();
  std::unique_ptr<Stack> stack = std::move(free_.back());
  free_.pop_back();
  allow_access(stack->bottom(), Stack::kBytes);
  return stack;
}

void StackPool::give_back(std::unique_ptr<Stack> stack) {
  if (!kThreadSanitizer) free_.push_back(std::move(stack));
}

// ---- switching

#if defined(__x86_64__)
// Saves the registers that a callee must keep, and the stack pointer in *from; goes on where `to` was saved.
extern "C" void pycoll_sim_switch(void** from, void* to);
asm(R"(
.text
.globl pycoll_sim_switch
.type pycoll_sim_switch, @function
pycoll_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pycoll_sim_switch, . - pycoll_sim_switch

.globl pycoll_sim_first
.type pycoll_sim_first, @function
pycoll_sim_first:
  movq %rbx, %rdi
  callq *%r12
  ud2
.size pycoll_sim_first, . - pycoll_sim_first
)");
extern "C" void pycoll_sim_first();
#endif

Fiber::Fiber(std::unique_ptr<Stack> stack, void (*entry)(void*), void* argument)
    : stack_(std::move(stack)), entry_(entry), argument_(argument) {
#if defined(__x86_64__)
  // What pycoll_sim_switch pops: r15 to rbp, the address to return to. Below it the stack is aligned to 16 bytes.
  auto* sp = reinterpret_cast<uintptr_t*>(stack_->top()) - 1;
  *--sp = 0;
  *--sp = reinterpret_cast<uintptr_t>(&pycoll_sim_first);
  *--sp = 0;                                   // rbp
  *--sp = reinterpret_cast<uintptr_t>(this);   // rbx
  *--sp = reinterpret_cast<uintptr_t>(start);  // r12
  for (int i = 0; i < 3; ++i) *--sp = 0;
  fiber_sp_ = sp;
#else
  getcontext(&fiber_context_);
  fiber_context_.uc_stack.ss_sp = stack_->bottom();
  fiber_context_.uc_stack.ss_size = Stack::kBytes;
  fiber_context_.uc_link = nullptr;
  const auto bits = reinterpret_cast<uintptr_t>(this);
  makecontext(&fiber_context_, reinterpret_cast<void (*)()>(+[](unsigned low, unsigned high) {
    start(reinterpret_cast<Fiber*>(uintptr_t{low} | static_cast<uintptr_t>(high) << 32));
  }),
              2, static_cast<unsigned>(bits),
              static_cast<unsigned>(static_cast<uint64_t>(bits) >> 32));
#endif
#if defined(PYCOLL_SIM_TSAN)
  fiber_handle_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(PYCOLL_SIM_TSAN)
  // One that a failure has left in the middle stays: ThreadSanitizer refuses the end of a thread whose accesses are unwatched.
  if (stack_ == nullptr) __tsan_destroy_fiber(fiber_handle_);
#endif
}

void Fiber::start(Fiber* fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &fiber->scheduler_bottom_, &fiber->scheduler_bytes_);
#endif
  fiber->entry_(fiber->argument_);
  std::abort();  // it must not return
}

void Fiber::enter() {
#if defined(PYCOLL_SIM_TSAN)
  scheduler_handle_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber_handle_, 1);  // 1: no synchronisation
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack_, stack_->bottom(), Stack::kBytes);
#endif
#if defined(__x86_64__)
  pycoll_sim_switch(&scheduler_sp_, fiber_sp_);
#else
  swapcontext(&scheduler_context_, &fiber_context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::leave() {
#if defined(PYCOLL_SIM_TSAN)
  __tsan_switch_to_fiber(scheduler_handle_, 1);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fiber_fake_stack_, scheduler_bottom_, scheduler_bytes_);
#endif
#if defined(__x86_64__)
  pycoll_sim_switch(&fiber_sp_, scheduler_sp_);
#else
  swapcontext(&fiber_context_, &scheduler_context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber_fake_stack_, &scheduler_bottom_, &scheduler_bytes_);
#endif
}

void Fiber::release([[maybe_unused]] void* tag) {
#if defined(PYCOLL_SIM_TSAN)
  void* const caller = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber_handle_, 1);
  __tsan_release(tag);
  __tsan_switch_to_fiber(caller, 1);
#endif
}

void Fiber::leave_for_good() {
#if defined(PYCOLL_SIM_TSAN)
  __tsan_switch_to_fiber(scheduler_handle_, 1);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(nullptr, scheduler_bottom_, scheduler_bytes_);
#endif
#if defined(__x86_64__)
  pycoll_sim_switch(&fiber_sp_, scheduler_sp_);
#else
  swapcontext(&fiber_context_, &scheduler_context_);
#endif
  std::abort();  // it must not be entered again
}

}  // namespace pycoll::sim
