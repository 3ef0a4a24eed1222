#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/reduce_scatter_ring.cuh"

namespace pycoll::cuda {

void launch_reduce_scatter_ring_ll128(const ReduceScatterRingArgs& args, LaunchConfig config,
                                      void* stream);  // reduce_scatter_ring_ll128.cu

void launch_reduce_scatter_ring(const ReduceScatterRingArgs& args, LaunchConfig config,
                                void* stream) {
  if (args.protocol == Protocol::kLL128)
    return launch_reduce_scatter_ring_ll128(args, config, stream);
  launch_reduction<ReduceScatterRingSimpleKernel>(args, config, stream);
}

}  // namespace pycoll::cuda
