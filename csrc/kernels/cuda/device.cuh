// What kernels need of the compiler and the runtime besides access to memory (peer_access.cuh): how functions, shared
// memory and launches are spelled, and the arithmetic for which a GPU has instructions of its own.
//
// A kernel is a struct: `Args`, `kMaxThreads`, and `static PYCOLL_DEVICE void run(const Args&)`. `launch<Kernel>(...)` runs it.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "base/error.h"
#include "kernels/cuda/launch.h"

#define PYCOLL_DEVICE __device__ __forceinline__

// `name` is an array of `count` elements that the threads of a block share; it is not initialised.
#define PYCOLL_SHARED(type, name, count) __shared__ type name[count]

#define PYCOLL_CUDA_CHECK(call)                                                                 \
  do {                                                                                          \
    const cudaError_t status = (call);                                                          \
    if (status != cudaSuccess) {                                                                \
      ::pycoll::fail(::pycoll::ErrorKind::kSystem, #call, ": ", cudaGetErrorName(status), ", ", \
                     cudaGetErrorString(status));                                               \
    }                                                                                           \
  } while (false)

namespace pycoll::cuda {

// ---- arithmetic

// The product, rounded: never fused with an addition that follows, whatever the compiler's flags are. A fused operation
// rounds once where the CPU's kernels round twice.
PYCOLL_DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }
PYCOLL_DEVICE double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The same of quotients: to nearest even, and toward zero.
PYCOLL_DEVICE float rounded_quotient(float a, float b) { return __fdiv_rn(a, b); }
PYCOLL_DEVICE float quotient_toward_zero(float a, float b) { return __fdiv_rz(a, b); }

PYCOLL_DEVICE float float_from_bits(uint32_t bits) { return __uint_as_float(bits); }
PYCOLL_DEVICE uint32_t bits_from_float(float x) { return __float_as_uint(x); }
PYCOLL_DEVICE double double_from_bits(uint64_t bits) {
  return __longlong_as_double(static_cast<long long>(bits));
}
PYCOLL_DEVICE uint64_t bits_from_double(double x) {
  return static_cast<uint64_t>(__double_as_longlong(x));
}

// Conversions of 16-bit floats, in bits; to the nearest, ties to even. Any NaN stands for all.
PYCOLL_DEVICE float float_from_float16(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
PYCOLL_DEVICE uint16_t float16_from_float(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
PYCOLL_DEVICE uint16_t bfloat16_from_float(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// ---- launches

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kMaxThreads, 1)
    run_kernel(const __grid_constant__ typename Kernel::Args args) {
  Kernel::run(args);
}

// Puts the kernel into the stream. What goes wrong while it runs is seen by later calls of the runtime.
template <class Kernel>
void launch(const typename Kernel::Args& args, LaunchConfig config, void* stream) {
  PYCOLL_CHECK(config.threads_per_block <= Kernel::kMaxThreads &&
               config.threads_per_block % 32 == 0);
  run_kernel<Kernel>
      <<<config.num_blocks, config.threads_per_block, 0, static_cast<cudaStream_t>(stream)>>>(args);
  PYCOLL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace pycoll::cuda
