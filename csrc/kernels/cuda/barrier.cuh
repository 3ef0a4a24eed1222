// All ranks wait for all ranks. Thread t writes this rank's epoch into its word of rank t's signals (release), and waits until
// rank t has done the same in this rank's signals (acquire). One write and one wait a peer, all at once.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/signals.cuh"
#include "kernels/cuda/thread_group.cuh"

namespace pycoll::cuda {

// What the threads of `group` did before, and what other threads did that is ordered before it, is seen by the threads of the
// other ranks' groups afterwards. False on every thread if a rank does not come. To be called by one group of each rank.
template <class Group>
PYCOLL_DEVICE bool meet_all_ranks(const Group& group, const BarrierArgs& args, uint32_t epoch) {
  group.sync();
  bool all_came = true;
  for (int peer = group.thread_rank(); peer < args.world_size; peer += group.num_threads()) {
    auto* signals_of_peer = static_cast<uint32_t*>(args.signals.of_rank[peer]);
    if (peer != args.rank && signals_of_peer != nullptr)
      peer::store_release(signals_of_peer + args.rank, epoch);
  }
  const auto* own_signals = static_cast<const uint32_t*>(args.signals.of_rank[args.rank]);
  for (int peer = group.thread_rank(); peer < args.world_size; peer += group.num_threads()) {
    if (peer == args.rank || args.signals.of_rank[peer] == nullptr) continue;
    all_came &= wait_reached(own_signals + peer, epoch, Phase::kBarrier, peer, args.watch);
  }
  return group.all(all_came);
}

struct BarrierKernel {
  using Args = BarrierArgs;
  static constexpr int kMaxThreads = 128;

  static PYCOLL_DEVICE void run(const Args& args) {
    const BlockGroup block;
    const uint32_t epoch = peer::load_relaxed(args.epoch) + 1;
    if (!block.all(!aborted(args.watch))) return;
    if (!meet_all_ranks(block, args, epoch)) return;
    if (block.thread_rank() == 0) peer::store_relaxed(args.epoch, epoch);
  }
};

}  // namespace pycoll::cuda
