#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/reduce_scatter_direct.cuh"

namespace pycoll::cuda {

void launch_reduce_scatter_direct_quantised(const ReduceScatterDirectArgs& args,
                                            LaunchConfig config, void* stream) {
  launch_on_wire<ReduceScatterDirectKernel>(args.reduction.dtype, args, config, stream);
}

}  // namespace pycoll::cuda
