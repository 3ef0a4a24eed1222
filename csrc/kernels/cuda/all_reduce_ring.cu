#include "kernels/cuda/all_reduce_ring.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace pycoll::cuda {

void launch_all_reduce_ring_ll128(const AllReduceRingArgs& args, LaunchConfig config,
                                  void* stream);  // all_reduce_ring_ll128.cu

void launch_all_reduce_ring(const AllReduceRingArgs& args, LaunchConfig config, void* stream) {
  if (args.protocol == Protocol::kLL128) return launch_all_reduce_ring_ll128(args, config, stream);
  launch_reduction<AllReduceRingSimpleKernel>(args, config, stream);
}

}  // namespace pycoll::cuda
