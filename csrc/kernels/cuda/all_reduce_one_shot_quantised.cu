#include "kernels/cuda/all_reduce_one_shot.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace pycoll::cuda {

void launch_all_reduce_one_shot_quantised(const AllReduceOneShotArgs& args, LaunchConfig config,
                                          void* stream) {
  launch_on_wire<AllReduceOneShotKernel>(args.reduction.dtype, args, config, stream);
}

}  // namespace pycoll::cuda
