#include "kernels/cuda/barrier.cuh"

namespace pycoll::cuda {

void launch_barrier(const BarrierArgs& args, LaunchConfig config, void* stream) {
  PYCOLL_CHECK(config.num_blocks == 1);
  launch<BarrierKernel>(args, config, stream);
}

}  // namespace pycoll::cuda
