#include "kernels/cuda/all_reduce_ring.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace pycoll::cuda {

void launch_all_reduce_ring_ll128(const AllReduceRingArgs& args, LaunchConfig config,
                                  void* stream) {
  launch_reduction<AllReduceRingLL128Kernel>(args, config, stream);
}

}  // namespace pycoll::cuda
