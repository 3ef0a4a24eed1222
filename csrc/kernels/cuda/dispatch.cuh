// From a dtype at run time to a kernel for it.
#pragma once

#include "base/error.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"

namespace pycoll::cuda {

// Epochs and signals have a place for each block.
inline void check_grid(LaunchConfig config) {
  PYCOLL_CHECK(config.num_blocks >= 1 && config.num_blocks <= kMaxBlocks);
}

// Launches Kernel<Element> for the reduction's element type. `Kernel` is a template of one parameter.
template <template <class> class Kernel, class Args>
void launch_reduction(const Args& args, LaunchConfig config, void* stream) {
  check_grid(config);
  const DType dtype = args.reduction.dtype;
  PYCOLL_CHECK_ARG(is_valid(args.reduction.op, dtype), name(args.reduction.op),
                   " has no meaning for ", name(dtype));
  PYCOLL_CHECK(args.reduction.op != ReduceOp::kAvg || args.reduction.divisor > 0);
  switch (dtype) {
    case DType::kFloat64:
      return launch<Kernel<Float64>>(args, config, stream);
    case DType::kFloat32:
      return launch<Kernel<Float32>>(args, config, stream);
    case DType::kFloat16:
      return launch<Kernel<Float16>>(args, config, stream);
    case DType::kBFloat16:
      return launch<Kernel<BFloat16>>(args, config, stream);
    case DType::kFloat8E4M3FN:
      return launch<Kernel<Float8E4M3FN>>(args, config, stream);
    case DType::kFloat8E5M2:
      return launch<Kernel<Float8E5M2>>(args, config, stream);
    case DType::kInt8:
      return launch<Kernel<Int8>>(args, config, stream);
    case DType::kInt16:
      return launch<Kernel<Int16>>(args, config, stream);
    case DType::kInt32:
      return launch<Kernel<Int32>>(args, config, stream);
    case DType::kInt64:
      return launch<Kernel<Int64>>(args, config, stream);
    case DType::kUInt8:
      return launch<Kernel<UInt8>>(args, config, stream);
    case DType::kUInt16:
      return launch<Kernel<UInt16>>(args, config, stream);
    case DType::kUInt32:
      return launch<Kernel<UInt32>>(args, config, stream);
    case DType::kUInt64:
      return launch<Kernel<UInt64>>(args, config, stream);
    case DType::kBool:
      return launch<Kernel<Bool>>(args, config, stream);
    case DType::kComplex64:
      return launch<Kernel<Complex64>>(args, config, stream);
    case DType::kComplex128:
      return launch<Kernel<Complex128>>(args, config, stream);
    default:
      fail(ErrorKind::kInvalidArgument, "no CUDA kernel reduces ", name(dtype));
  }
}

// Launches Kernel<Part> for kernels that move bytes: `bits` holds every address and number of bytes, and tells what they are all
// aligned to.
template <template <class> class Kernel, class Args>
void launch_mover(uint64_t bits, const Args& args, LaunchConfig config, void* stream) {
  check_grid(config);
  if (bits % 8 == 0) return launch<Kernel<uint64_t>>(args, config, stream);
  if (bits % 4 == 0) return launch<Kernel<uint32_t>>(args, config, stream);
  if (bits % 2 == 0) return launch<Kernel<uint16_t>>(args, config, stream);
  return launch<Kernel<uint8_t>>(args, config, stream);
}

inline uint64_t address_bits(const void* p) { return reinterpret_cast<uintptr_t>(p); }

}  // namespace pycoll::cuda
