// torch's storages in the shared heap of this process. docs/memory_model.md, "Tensors that peers reach directly".
#pragma once

#include <ATen/core/Tensor.h>

#include "memory/shared_heap.h"

namespace pycoll::torch_adapter {

// Storages up to this size are left to torch: such tensors travel beside the signal.
inline constexpr size_t kLeastSharedBytes = size_t{16} << 10;

// An uninitialised, contiguous tensor whose storage lies in the heap; raises kSystem where it has no room.
at::Tensor shared_empty(at::IntArrayRef size, at::ScalarType dtype);

// From now on torch's CPU allocator asks, for each storage of more than kLeastSharedBytes, whether it is to lie in the heap. It is
// where the process or the calling thread says so, the process is no forked child, and the heap has room. Raises kInvalidArgument where
// another allocator has a higher priority.
void install_shared_allocator();
void set_shared_for_process(bool on);
bool shared_for_process();
// Of nested scopes on this thread, the innermost counts. The value that was set before.
enum class ThreadChoice : int8_t { kAsProcess, kShared, kPlain };
ThreadChoice set_shared_for_thread(ThreadChoice choice);

// Blocks of the heap for others than storages.
std::byte* allocate_shared(size_t nbytes);
void release_shared(void* data);
// Whether peers of this process's groups map all of [data, data + nbytes).
bool is_shared(const void* data, size_t nbytes);
SharedHeap::Stats shared_stats();
void trim_shared();

}  // namespace pycoll::torch_adapter
