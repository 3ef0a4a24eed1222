#include "kernels/cuda/all_reduce_two_shot.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace pycoll::cuda {

void launch_all_reduce_two_shot_quantised(const AllReduceTwoShotArgs& args, LaunchConfig config,
                                          void* stream) {
  launch_on_wire<AllReduceTwoShotKernel>(args.reduction.dtype, args, config, stream);
}

}  // namespace pycoll::cuda
