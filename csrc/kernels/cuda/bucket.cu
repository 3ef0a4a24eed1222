#include "base/error.h"
#include "kernels/cuda/bucket.cuh"

namespace pycoll::cuda {
namespace {

template <class TensorElement, class BucketElement>
void launch_pair(Direction direction, const BucketArgs& args, LaunchConfig config, void* stream) {
  if (direction == Direction::kFlatten) {
    launch<BucketKernel<TensorElement, BucketElement, Direction::kFlatten>>(args, config, stream);
  } else {
    launch<BucketKernel<BucketElement, TensorElement, Direction::kUnflatten>>(args, config, stream);
  }
}

void launch_either(Direction direction, const BucketArgs& args, LaunchConfig config, void* stream) {
  const DType tensor = args.tensor_dtype, bucket = args.bucket_dtype;
  const auto is = [&](DType t, DType b) { return tensor == t && bucket == b; };
  if (is(DType::kFloat32, DType::kFloat32))
    return launch_pair<Float32, Float32>(direction, args, config, stream);
  if (is(DType::kFloat32, DType::kFloat16))
    return launch_pair<Float32, Float16>(direction, args, config, stream);
  if (is(DType::kFloat32, DType::kBFloat16))
    return launch_pair<Float32, BFloat16>(direction, args, config, stream);
  if (is(DType::kFloat32, DType::kFloat8E4M3FN))
    return launch_pair<Float32, Float8E4M3FN>(direction, args, config, stream);
  if (is(DType::kFloat32, DType::kFloat8E5M2))
    return launch_pair<Float32, Float8E5M2>(direction, args, config, stream);
  if (is(DType::kFloat16, DType::kFloat16))
    return launch_pair<Float16, Float16>(direction, args, config, stream);
  if (is(DType::kFloat16, DType::kFloat32))
    return launch_pair<Float16, Float32>(direction, args, config, stream);
  if (is(DType::kBFloat16, DType::kBFloat16))
    return launch_pair<BFloat16, BFloat16>(direction, args, config, stream);
  if (is(DType::kBFloat16, DType::kFloat32))
    return launch_pair<BFloat16, Float32>(direction, args, config, stream);
  fail(ErrorKind::kInvalidArgument, "no bucket of ", name(bucket), " for tensors of ",
       name(tensor));
}

}  // namespace

void launch_flatten(const BucketArgs& args, LaunchConfig config, void* stream) {
  launch_either(Direction::kFlatten, args, config, stream);
}
void launch_unflatten(const BucketArgs& args, LaunchConfig config, void* stream) {
  launch_either(Direction::kUnflatten, args, config, stream);
}

}  // namespace pycoll::cuda
