#include "kernels/cuda/all_reduce_one_shot.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace pycoll::cuda {

void launch_all_reduce_one_shot(const AllReduceOneShotArgs& args, LaunchConfig config,
                                void* stream) {
  PYCOLL_CHECK(args.capacity_units % 8 == 0);
  PYCOLL_CHECK(args.numel * itemsize(args.reduction.dtype) <= args.capacity_units * kUnitBytes);
  launch_reduction<AllReduceOneShotKernel>(args, config, stream);
}

}  // namespace pycoll::cuda
