#include "kernels/cuda/all_reduce_multimem.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace pycoll::cuda {

void launch_all_reduce_multimem(const AllReduceMultimemArgs& args, LaunchConfig config,
                                void* stream) {
  check_grid(config);
  PYCOLL_CHECK(args.numel * itemsize(args.dtype) % kUnitBytes == 0);
  switch (args.dtype) {
    case DType::kFloat32:
      return launch<AllReduceMultimemKernel<Float32>>(args, config, stream);
    case DType::kFloat16:
      return launch<AllReduceMultimemKernel<Float16>>(args, config, stream);
    case DType::kBFloat16:
      return launch<AllReduceMultimemKernel<BFloat16>>(args, config, stream);
    default:
      fail(ErrorKind::kInvalidArgument, "the switch does not add ", name(args.dtype));
  }
}

}  // namespace pycoll::cuda
