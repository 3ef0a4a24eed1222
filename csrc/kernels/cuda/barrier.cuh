// All ranks wait for all ranks: a meeting (meeting.cuh) and nothing else. One write and one wait a peer, all at once.
#pragma once

#include "kernels/cuda/meeting.cuh"

namespace pycoll::cuda {

struct BarrierKernel {
  using Args = BarrierArgs;
  static constexpr int kMaxThreads = 128;

  static PYCOLL_DEVICE void run(const Args& args) {
    const BlockGroup block;
    const Meeting meeting(args.group, block);
    if (meeting.begin({}, nullptr)) meeting.end();
  }
};

}  // namespace pycoll::cuda
