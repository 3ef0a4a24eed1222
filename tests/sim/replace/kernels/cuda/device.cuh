// The simulator's csrc/kernels/cuda/device.cuh: same names, run by fibers.
#pragma once

#include <cxxabi.h>

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <typeinfo>

#include "base/error.h"
#include "half.h"
#include "kernels/cuda/launch.h"
#include "rendezvous.h"
#include "scheduler.h"

#define PYCOLL_DEVICE inline

#define PYCOLL_SIM_TEXT_OF(x) #x
#define PYCOLL_SIM_TEXT(x) PYCOLL_SIM_TEXT_OF(x)
#define PYCOLL_SHARED(type, name, count)                                   \
  type* const name = static_cast<type*>(::pycoll::sim::meet::shared_array( \
      __FILE__ ":" PYCOLL_SIM_TEXT(__LINE__), sizeof(type) * (count)))

namespace pycoll::sim {

inline const Thread& this_thread() { return Scheduler::current()->self(); }

template <class Kernel>
std::string kernel_name() {
  int status = 0;
  char* const name = abi::__cxa_demangle(typeid(Kernel).name(), nullptr, nullptr, &status);
  std::string text = name != nullptr ? name : typeid(Kernel).name();
  std::free(name);
  constexpr const char* kNamespace = "pycoll::cuda::";
  for (size_t at; (at = text.find(kNamespace)) != std::string::npos;)
    text.erase(at, std::strlen(kNamespace));
  return text;
}

}  // namespace pycoll::sim

#define threadIdx (::pycoll::sim::this_thread().thread_index)
#define blockIdx (::pycoll::sim::this_thread().block_index)
#define blockDim (::pycoll::sim::this_thread().block_dim)
#define gridDim (::pycoll::sim::this_thread().grid_dim)

inline void __syncthreads() { ::pycoll::sim::meet::block_barrier("__syncthreads"); }
inline int __syncthreads_and(int condition) { return ::pycoll::sim::meet::block_all(condition); }
inline void __syncwarp(uint32_t mask) { ::pycoll::sim::meet::warp_barrier(mask); }
inline uint32_t __ballot_sync(uint32_t mask, int condition) {
  return ::pycoll::sim::meet::ballot(mask, condition != 0);
}
inline int __all_sync(uint32_t mask, int condition) { return __ballot_sync(mask, !condition) == 0; }
inline int __any_sync(uint32_t mask, int condition) { return __ballot_sync(mask, condition) != 0; }
template <class T>
T __shfl_sync(uint32_t mask, T value, int source_lane) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  bits = ::pycoll::sim::meet::shuffle(mask, bits, source_lane % 32);
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes) {
  return __shfl_sync(mask, value, ::pycoll::sim::this_thread().lane ^ lanes);
}

namespace pycoll::cuda {

inline float rounded_product(float a, float b) { return a * b; }
inline double rounded_product(double a, double b) { return a * b; }
inline float rounded_quotient(float a, float b) { return a / b; }
// Of floats that are not negative. The product is exact in double, and so is the comparison.
inline float quotient_toward_zero(float a, float b) {
  const float q = a / b;
  const bool is_above = static_cast<double>(q) * static_cast<double>(b) > static_cast<double>(a);
  return is_above ? std::bit_cast<float>(std::bit_cast<uint32_t>(q) - 1) : q;
}
inline float float_from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t bits_from_float(float x) { return std::bit_cast<uint32_t>(x); }
inline double double_from_bits(uint64_t bits) { return std::bit_cast<double>(bits); }
inline uint64_t bits_from_double(double x) { return std::bit_cast<uint64_t>(x); }
inline float float_from_float16(uint16_t bits) { return sim::float_of_half(bits); }
inline uint16_t float16_from_float(float x) { return sim::half_of_float(x); }
inline uint16_t bfloat16_from_float(float x) { return sim::bfloat16_of_float(x); }

template <class Kernel>
void launch(const typename Kernel::Args& args, LaunchConfig config, void* stream) {
  PYCOLL_CHECK(config.threads_per_block <= Kernel::kMaxThreads);
  static_cast<sim::Stream*>(stream)->launch({sim::kernel_name<Kernel>(), config.num_blocks,
                                             config.threads_per_block,
                                             [args] { Kernel::run(args); }});
}

}  // namespace pycoll::cuda
