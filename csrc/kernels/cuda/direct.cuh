// Direct kernels: every rank writes what another one is to have into a slot of that rank's memory, then raises a signal there.
//
// Block b of a rank works with the blocks b of the others and has slots and signals of its own. An *area* has one slot and one
// signal for each source. A signal holds epoch and number of iterations done (meeting.cuh, segments.cuh).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/meeting.cuh"
#include "kernels/cuda/peer_access.cuh"
#include "kernels/cuda/segments.cuh"
#include "kernels/cuda/signals.cuh"
#include "kernels/cuda/thread_group.cuh"
#include "topology/ring.h"

namespace pycoll::cuda {

class DirectLanes {
 public:
  PYCOLL_DEVICE DirectLanes(const Group& group, const DirectStaging& staging,
                            const BlockGroup& block, uint32_t epoch)
      : group_(group), staging_(staging), block_(block), epoch_(epoch) {}

  PYCOLL_DEVICE const BlockGroup& block() const { return block_; }
  PYCOLL_DEVICE bool is_peer(int rank) const { return cuda::is_peer(group_, staging_.slots, rank); }
  PYCOLL_DEVICE bool takes_part(int rank) const { return rank == group_.rank || is_peer(rank); }
  // Each rank begins with the one after it, so that they do not all work on the same one's memory.
  template <class Fn>
  PYCOLL_DEVICE void for_each_peer(Fn fn) const {
    for (int rank = next(group_.rank); rank != group_.rank; rank = next(rank))
      if (is_peer(rank)) fn(rank);
  }
  // Where `src` leaves data for `dst`.
  PYCOLL_DEVICE Vector16* slot(int area, int dst, int src) const {
    const auto world_size = static_cast<size_t>(group_.world_size);
    const size_t place = static_cast<size_t>(area) * static_cast<size_t>(num_blocks()) +
                         static_cast<size_t>(block_index());
    return static_cast<Vector16*>(staging_.slots.of_rank[dst]) +
           (place * world_size + static_cast<size_t>(src)) * staging_.slot_units;
  }

  // Every thread's stores to slots, and its loads from own slots, are over for the peers that see the signal. `is_wanted(peer)`
  // says whom to tell.
  template <class IsWanted>
  PYCOLL_DEVICE void post(int area, uint32_t iterations, IsWanted is_wanted) const {
    block_.sync();
    for (int dst = block_.thread_rank(); dst < group_.world_size; dst += block_.num_threads()) {
      if (is_peer(dst) && is_wanted(dst))
        peer::store_release(signal(area, dst, group_.rank), signal_value(epoch_, iterations));
    }
  }
  // Until the peers have posted as much. False, on every thread of the block, if one does not.
  template <class IsWanted>
  PYCOLL_DEVICE bool wait(int area, uint32_t iterations, Phase phase, IsWanted is_wanted) const {
    bool all_came = true;
    for (int src = block_.thread_rank(); src < group_.world_size; src += block_.num_threads()) {
      if (is_peer(src) && is_wanted(src))
        all_came &= wait_reached(signal(area, group_.rank, src), signal_value(epoch_, iterations),
                                 phase, src, group_.watch);
    }
    return block_.all(all_came);
  }

 private:
  PYCOLL_DEVICE int next(int rank) const { return ring::next(rank, group_.world_size); }
  PYCOLL_DEVICE uint64_t* signal(int area, int dst, int src) const {
    return static_cast<uint64_t*>(staging_.signals.of_rank[dst]) +
           (area * kMaxBlocks + block_index()) * group_.world_size + src;
  }

  const Group& group_;
  const DirectStaging& staging_;
  const BlockGroup& block_;
  const uint32_t epoch_;
};

struct Everybody {
  PYCOLL_DEVICE bool operator()(int) const { return true; }
};

}  // namespace pycoll::cuda
