// From a dtype at run time to a kernel for it.
#pragma once

#include "base/error.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/quantised_wire.cuh"

namespace pycoll::cuda {

// Epochs and signals have a place for each block.
inline void check_grid(LaunchConfig config) {
  PYCOLL_CHECK(config.num_blocks >= 1 && config.num_blocks <= kMaxBlocks);
}

inline void check_reduction(const Reduction& reduction) {
  PYCOLL_CHECK_ARG(is_valid(reduction.op, reduction.dtype), name(reduction.op),
                   " has no meaning for ", name(reduction.dtype));
  PYCOLL_CHECK(reduction.op != ReduceOp::kAvg || reduction.divisor > 0);
}

inline void check_lead(size_t lead_bytes, size_t item) {
  PYCOLL_CHECK_ARG(lead_bytes < kUnitBytes && lead_bytes % item == 0, "lead_bytes is ", lead_bytes,
                   " with elements of ", item, " bytes; give a multiple of them below 16");
}

// Launches Kernel<Element> for the reduction's element type. `Kernel` is a template of one parameter.
template <template <class> class Kernel, class Args>
void launch_reduction(const Args& args, LaunchConfig config, void* stream) {
  check_grid(config);
  check_reduction(args.reduction);
  check_lead(args.lead_bytes, itemsize(args.reduction.dtype));
  switch (args.reduction.dtype) {
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
    case DType::kComplex32:
      return launch<Kernel<Complex32>>(args, config, stream);
    case DType::kComplex64:
      return launch<Kernel<Complex64>>(args, config, stream);
    case DType::kComplex128:
      return launch<Kernel<Complex128>>(args, config, stream);
    default:
      fail(ErrorKind::kInvalidArgument, "no CUDA kernel reduces ", name(args.reduction.dtype));
  }
}

template <template <class> class Kernel, class Data, class Args>
void launch_for_codes(const Args& args, LaunchConfig config, void* stream) {
  switch (args.wire.dtype) {
    case DType::kFloat8E4M3FN:
      return launch<Kernel<QuantisedWire<Data, Float8E4M3FN>>>(args, config, stream);
    case DType::kFloat8E5M2:
      return launch<Kernel<QuantisedWire<Data, Float8E5M2>>>(args, config, stream);
    case DType::kInt8:
      return launch<Kernel<QuantisedWire<Data, Int8Code>>>(args, config, stream);
    default:
      fail(ErrorKind::kInvalidArgument, "wire_dtype is ", name(args.wire.dtype),
           ", but codes are float8_e4m3fn, float8_e5m2 or int8; choose one of these");
  }
}

// Launches Kernel<QuantisedWire<...>> for data of `dtype`.
template <template <class> class Kernel, class Args>
void launch_on_wire(DType dtype, const Args& args, LaunchConfig config, void* stream) {
  check_grid(config);
  const size_t block = args.wire.block_numel;
  PYCOLL_CHECK_ARG(block >= 32 && block <= 512 && (block & (block - 1)) == 0, "block is ", block,
                   " elements; GPUs take a power of two from 32 to 512");
  if constexpr (requires { args.reduction; }) check_reduction(args.reduction);
  if constexpr (requires { args.staging; })
    PYCOLL_CHECK(quantised_slot_blocks(args.staging.slot_units, block) > 0);
  switch (dtype) {
    case DType::kFloat32:
      return launch_for_codes<Kernel, Float32>(args, config, stream);
    case DType::kFloat16:
      return launch_for_codes<Kernel, Float16>(args, config, stream);
    case DType::kBFloat16:
      return launch_for_codes<Kernel, BFloat16>(args, config, stream);
    default:
      fail(ErrorKind::kInvalidArgument, "the tensor is ", name(dtype), " and wire_dtype ",
           name(args.wire.dtype), ", but only float32, float16 and bfloat16 are quantised");
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
