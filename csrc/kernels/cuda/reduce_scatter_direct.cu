#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/reduce_scatter_direct.cuh"

namespace pycoll::cuda {

void launch_reduce_scatter_direct(const ReduceScatterDirectArgs& args, LaunchConfig config,
                                  void* stream) {
  launch_reduction<ReduceScatterDirectKernel>(args, config, stream);
}

}  // namespace pycoll::cuda
