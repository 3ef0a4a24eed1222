#include "kernels/cuda/all_reduce_one_shot.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace pycoll::cuda {

void launch_all_reduce_one_shot_quantised(const AllReduceOneShotArgs& args, LaunchConfig config,
                                          void* stream);  // all_reduce_one_shot_quantised.cu

namespace {

template <class Element>
using Kernel = AllReduceOneShotKernel<PlainWire<Element>>;

}  // namespace

void launch_all_reduce_one_shot(const AllReduceOneShotArgs& args, LaunchConfig config,
                                void* stream) {
  PYCOLL_CHECK(args.capacity_units % 8 == 0);
  PYCOLL_CHECK(packet_units(args.numel, args.reduction.dtype, args.wire, args.lead_bytes) <=
               args.capacity_units);
  if (args.wire.is_quantised() && args.group.world_size > 1)
    return launch_all_reduce_one_shot_quantised(args, config, stream);
  launch_reduction<Kernel>(args, config, stream);
}

}  // namespace pycoll::cuda
