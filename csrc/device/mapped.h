// Collectives on symmetric tensors: all ranks see them, so kernels read and write them where they lie, or the switch does.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device/collectives.h"

namespace pycoll::device {

// Where a tensor of this rank, and those at the same place of the other ranks' symmetric memory, are seen.
struct MappedTensor {
  cuda::PeerTable of_rank;
  std::byte* multicast = nullptr;
  uint64_t place =
      0;  // in the group's symmetric memory: the same on all ranks, or they do not use the same tensor
};

// The symmetric memory that a group knows of. Thread-safe.
class Windows {
 public:
  // Memory of `nbytes` on each rank; `rank` is this one. All ranks add the same, in the same order.
  void add(PeerMemory memory, size_t nbytes, int rank);
  std::optional<MappedTensor> find(const std::byte* data, size_t nbytes) const;

 private:
  struct Window {
    PeerMemory memory;
    std::byte* base;
    size_t nbytes;
  };
  mutable std::mutex mutex_;
  std::vector<Window>
      windows_;  // the newest last: an address may have been given back and out again
};

// The tensor of a request that peers would read or write, if it is one, contiguous, and a kernel does that: of all_reduce and
// broadcast the tensor, of reduce_scatter the input, of all_gather the output.
std::optional<MappedTensor> find_mapped(const Request& request, const Windows& windows);

// Whether the switch can do it: SUM of float32, float16 or bfloat16, in whole units, where all ranks are one multicast address.
bool fits_multimem(const Request& request, const MappedTensor& tensor,
                   const cuda::Launchers& launchers, int world_size);

// Puts the kernel of the choice, kMapped or kMultimem, into the stream.
void launch_mapped(const Place& place, const Request& request, const Choice& choice,
                   const MappedTensor& tensor);

}  // namespace pycoll::device
