#include "base/error.h"
#include "kernels/cuda/quantise.cuh"

namespace pycoll::cuda {
namespace {

template <template <class, class> class Kernel, class Data>
void launch_for_code(const QuantiseArgs& args, LaunchConfig config, void* stream) {
  switch (args.code_dtype) {
    case DType::kFloat8E4M3FN:
      return launch<Kernel<Data, Float8E4M3FN>>(args, config, stream);
    case DType::kFloat8E5M2:
      return launch<Kernel<Data, Float8E5M2>>(args, config, stream);
    case DType::kInt8:
      return launch<Kernel<Data, Int8Code>>(args, config, stream);
    default:
      fail(ErrorKind::kInvalidArgument, "no quantisation to ", name(args.code_dtype));
  }
}

template <template <class, class> class Kernel>
void launch_for_data(const QuantiseArgs& args, LaunchConfig config, void* stream) {
  PYCOLL_CHECK_ARG(args.block_numel > 0, "block is 0; give a positive number of elements");
  switch (args.data_dtype) {
    case DType::kFloat32:
      return launch_for_code<Kernel, Float32>(args, config, stream);
    case DType::kFloat16:
      return launch_for_code<Kernel, Float16>(args, config, stream);
    case DType::kBFloat16:
      return launch_for_code<Kernel, BFloat16>(args, config, stream);
    default:
      fail(ErrorKind::kInvalidArgument, "no quantisation of ", name(args.data_dtype));
  }
}

}  // namespace

void launch_quantise(const QuantiseArgs& args, LaunchConfig config, void* stream) {
  launch_for_data<QuantiseKernel>(args, config, stream);
}
void launch_dequantise(const QuantiseArgs& args, LaunchConfig config, void* stream) {
  launch_for_data<DequantiseKernel>(args, config, stream);
}

}  // namespace pycoll::cuda
