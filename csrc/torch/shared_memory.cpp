#include "torch/shared_memory.h"

#include <atomic>

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include "base/log.h"
#include "torch/errors.h"
#include "torch/runtime.h"

namespace pycoll::torch_adapter {
namespace {

constexpr uint8_t kPriority = 1;  // above torch's own

std::atomic<bool> g_for_process{false};
thread_local ThreadChoice t_choice = ThreadChoice::kAsProcess;

// The endpoint whose heap holds tensors of this process, or null. A forked child does not touch its parent's.
Endpoint* endpoint() {
  const Runtime* runtime = pinned_runtime();
  if (runtime == nullptr || runtime->endpoint->forked()) return nullptr;
  return runtime->endpoint.get();
}

// Also in a child that frees what it has inherited: then nothing happens.
void release_heap_block(void* data) {
  c10::profiledCPUMemoryReporter().Delete(data);
  release_shared(data);
}

class HeapAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &release_heap_block, c10::kCPU};
    void* data = translated([&] { return allocate_shared(nbytes); });
    c10::profiledCPUMemoryReporter().New(data, nbytes);
    return {data, data, &release_heap_block, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_heap_block; }
  void copy_data(void* dst, const void* src, size_t nbytes) const override {
    default_copy_data(dst, src, nbytes);
  }
};

bool wants_shared(size_t nbytes) {
  if (nbytes <= kLeastSharedBytes) return false;
  if (t_choice != ThreadChoice::kAsProcess) return t_choice == ThreadChoice::kShared;
  return g_for_process.load(std::memory_order_relaxed);
}

// Null where the heap has no room: a program must not end for want of a faster path.
void* try_allocate(size_t nbytes) {
  const Runtime* runtime = pinned_runtime();
  if (runtime != nullptr && runtime->endpoint->forked()) return nullptr;
  try {
    return allocate_shared(nbytes);
  } catch (const Error& error) {
    static std::atomic<bool> warned{false};
    if (!warned.exchange(true)) {
      PYCOLL_LOG(LogLevel::kWarn, "a tensor of ", nbytes,
                 " bytes is not allocated in shared memory, and others may not be, either: ",
                 error.what());
    }
    return nullptr;
  }
}

void release_either(void* data) {
  if (data == nullptr) return;
  const Runtime* runtime = pinned_runtime();
  if (runtime != nullptr && runtime->endpoint->heap().contains(data, 1)) {
    release_heap_block(data);
  } else {
    c10::GetDefaultCPUAllocator()->raw_deallocate(data);
  }
}

class SwitchingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = wants_shared(nbytes) ? try_allocate(nbytes) : nullptr;
    if (data != nullptr) {
      c10::profiledCPUMemoryReporter().New(data, nbytes);
    } else {
      data = c10::GetDefaultCPUAllocator()->raw_allocate(nbytes);
    }
    return {data, data, &release_either, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_either; }
  void copy_data(void* dst, const void* src, size_t nbytes) const override {
    default_copy_data(dst, src, nbytes);
  }
};

}  // namespace

at::Tensor shared_empty(at::IntArrayRef size, at::ScalarType dtype) {
  // Never destroyed: storages may outlive other statics.
  static auto* const allocator = new HeapAllocator();
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  return at::Tensor(at::detail::empty_generic(size, allocator, keys, dtype, std::nullopt));
}

void install_shared_allocator() {
  static auto* const instance = new SwitchingAllocator();
  if (c10::GetCPUAllocator() == instance) return;
  c10::SetCPUAllocator(instance, kPriority);
  PYCOLL_CHECK_ARG(c10::GetCPUAllocator() == instance,
                   "the CPU allocator of this process has been replaced by one of a priority "
                   "above ",
                   int{kPriority}, "; make tensors with pycoll.symmetric_empty instead");
}

void set_shared_for_process(bool on) { g_for_process.store(on, std::memory_order_relaxed); }
bool shared_for_process() { return g_for_process.load(std::memory_order_relaxed); }

ThreadChoice set_shared_for_thread(ThreadChoice choice) { return std::exchange(t_choice, choice); }

std::byte* allocate_shared(size_t nbytes) {
  return pin_runtime()->endpoint->heap().allocate(nbytes);
}

void release_shared(void* data) {
  Endpoint* here = endpoint();
  // Not in this heap: of the parent, freed by a child that has made a heap of its own.
  if (here != nullptr && here->heap().contains(data, 1)) {
    here->heap().release(static_cast<std::byte*>(data));
  }
}

bool is_shared(const void* data, size_t nbytes) {
  Endpoint* here = endpoint();
  return here != nullptr && here->heap().contains(data, nbytes);
}

SharedHeap::Stats shared_stats() {
  Endpoint* here = endpoint();
  return here == nullptr ? SharedHeap::Stats{} : here->heap().stats();
}

void trim_shared() {
  if (Endpoint* here = endpoint()) here->heap().trim();
}

}  // namespace pycoll::torch_adapter
