#include "kernels/cuda/all_reduce_quantised.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace pycoll::cuda {
namespace {

template <class Data>
void launch_for_wire(const AllReduceQuantisedArgs& args, LaunchConfig config, void* stream) {
  switch (args.wire_dtype) {
    case DType::kFloat8E4M3FN:
      return launch<AllReduceQuantisedKernel<Data, Float8E4M3FN>>(args, config, stream);
    case DType::kFloat8E5M2:
      return launch<AllReduceQuantisedKernel<Data, Float8E5M2>>(args, config, stream);
    case DType::kInt8:
      return launch<AllReduceQuantisedKernel<Data, Int8Code>>(args, config, stream);
    default:
      fail(ErrorKind::kInvalidArgument, "no wire type ", name(args.wire_dtype));
  }
}

}  // namespace

void launch_all_reduce_quantised(const AllReduceQuantisedArgs& args, LaunchConfig config,
                                 void* stream) {
  check_grid(config);
  const size_t block = args.block_numel;
  PYCOLL_CHECK_ARG(block >= 32 && block <= 512 && (block & (block - 1)) == 0, "blocks of ", block,
                   " elements: a power of two from 32 to 512 is needed");
  PYCOLL_CHECK(args.staging.slot_units * kUnitBytes >= block + sizeof(float));
  switch (args.dtype) {
    case DType::kFloat32:
      return launch_for_wire<Float32>(args, config, stream);
    case DType::kFloat16:
      return launch_for_wire<Float16>(args, config, stream);
    case DType::kBFloat16:
      return launch_for_wire<BFloat16>(args, config, stream);
    default:
      fail(ErrorKind::kInvalidArgument, "no quantised all_reduce of ", name(args.dtype));
  }
}

}  // namespace pycoll::cuda
