#include "kernels/cuda/all_reduce_two_shot.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace pycoll::cuda {

void launch_all_reduce_two_shot_quantised(const AllReduceTwoShotArgs& args, LaunchConfig config,
                                          void* stream);  // all_reduce_two_shot_quantised.cu

namespace {

template <class Element>
using Kernel = AllReduceTwoShotKernel<PlainWire<Element>>;

}  // namespace

void launch_all_reduce_two_shot(const AllReduceTwoShotArgs& args, LaunchConfig config,
                                void* stream) {
  if (args.wire.is_quantised() && args.group.world_size > 1)
    return launch_all_reduce_two_shot_quantised(args, config, stream);
  launch_reduction<Kernel>(args, config, stream);
}

}  // namespace pycoll::cuda
