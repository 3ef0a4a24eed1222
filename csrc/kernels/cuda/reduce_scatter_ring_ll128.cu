#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/reduce_scatter_ring.cuh"

namespace pycoll::cuda {

void launch_reduce_scatter_ring_ll128(const ReduceScatterRingArgs& args, LaunchConfig config,
                                      void* stream) {
  launch_reduction<ReduceScatterRingLL128Kernel>(args, config, stream);
}

}  // namespace pycoll::cuda
