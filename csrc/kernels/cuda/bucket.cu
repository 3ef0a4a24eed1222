#include "base/error.h"
#include "kernels/cuda/bucket.cuh"

namespace pycoll::cuda {
namespace {

template <class From, class To>
void launch_pair(const BucketArgs& args, LaunchConfig config, void* stream) {
  launch<BucketKernel<From, To>>(args, config, stream);
}

[[noreturn]] void refuse(const BucketArgs& args) {
  fail(ErrorKind::kInvalidArgument, "tensors are ", name(args.tensor_dtype), " and the bucket ",
       name(args.bucket_dtype),
       ", which are neither cast to one another nor, with a scale or to be added, computed with");
}

// A type that is cast to others: calls `fn` with its element type.
template <class Fn>
bool with_float(DType dtype, Fn fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(Float32{}), true;
    case DType::kFloat16:
      return fn(Float16{}), true;
    case DType::kBFloat16:
      return fn(BFloat16{}), true;
    case DType::kFloat8E4M3FN:
      return fn(Float8E4M3FN{}), true;
    case DType::kFloat8E5M2:
      return fn(Float8E5M2{}), true;
    default:
      return false;
  }
}

void launch_move(const BucketArgs& args, LaunchConfig config, void* stream) {
  const auto move = [&]<class Raw>(Raw) { launch_pair<Raw, Raw>(args, config, stream); };
  switch (itemsize(args.bucket_dtype)) {
    case 1:
      return move(RawElement<DType::kUInt8, uint8_t>{});
    case 2:
      return move(RawElement<DType::kUInt16, uint16_t>{});
    case 4:
      return move(RawElement<DType::kUInt32, uint32_t>{});
    case 8:
      return move(RawElement<DType::kUInt64, uint64_t>{});
    default:
      return move(RawElement<DType::kComplex128, Vector16>{});
  }
}

void launch_bucket(const BucketArgs& args, DType from, DType to, LaunchConfig config,
                   void* stream) {
  if (args.moves()) return launch_move(args, config, stream);
  if (from == DType::kFloat64 && to == from)
    return launch_pair<Float64, Float64>(args, config, stream);
  const bool is_known = with_float(from, [&]<class From>(From) {
    const bool is_castable =
        with_float(to, [&]<class To>(To) { launch_pair<From, To>(args, config, stream); });
    if (!is_castable) refuse(args);
  });
  if (!is_known) refuse(args);
}

}  // namespace

void launch_flatten(const BucketArgs& args, LaunchConfig config, void* stream) {
  BucketArgs flatten = args;
  flatten.direction = Direction::kFlatten;
  launch_bucket(flatten, args.tensor_dtype, args.bucket_dtype, config, stream);
}
void launch_unflatten(const BucketArgs& args, LaunchConfig config, void* stream) {
  BucketArgs unflatten = args;
  unflatten.direction = Direction::kUnflatten;
  launch_bucket(unflatten, args.bucket_dtype, args.tensor_dtype, config, stream);
}

}  // namespace pycoll::cuda
