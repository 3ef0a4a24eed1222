#include "kernels/cuda/barrier.cuh"

namespace pycoll::cuda {

void launch_barrier(const BarrierArgs& args, LaunchConfig config, void* stream) {
  launch<BarrierKernel>(args, config, stream);
}

}  // namespace pycoll::cuda
