#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/reduce_scatter_direct.cuh"

namespace pycoll::cuda {

void launch_reduce_scatter_direct_quantised(const ReduceScatterDirectArgs& args,
                                            LaunchConfig config,
                                            void* stream);  // reduce_scatter_direct_quantised.cu

namespace {

template <class Element>
using Kernel = ReduceScatterDirectKernel<PlainWire<Element>>;

}  // namespace

void launch_reduce_scatter_direct(const ReduceScatterDirectArgs& args, LaunchConfig config,
                                  void* stream) {
  if (args.wire.is_quantised() && args.group.world_size > 1)
    return launch_reduce_scatter_direct_quantised(args, config, stream);
  launch_reduction<Kernel>(args, config, stream);
}

}  // namespace pycoll::cuda
