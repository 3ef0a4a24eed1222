#include "kernels/cuda/all_reduce_two_shot.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace pycoll::cuda {

void launch_all_reduce_two_shot(const AllReduceTwoShotArgs& args, LaunchConfig config,
                                void* stream) {
  launch_reduction<AllReduceTwoShotKernel>(args, config, stream);
}

}  // namespace pycoll::cuda
