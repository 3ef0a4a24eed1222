#include <cstring>

#include "kernels/cpu/roofline.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pycoll::cpu {
namespace {

namespace scalar {
constexpr size_t kVectorBytes = 16;
using Vector = float __attribute__((vector_size(kVectorBytes)));
#if defined(__x86_64__)
inline void stream(float* to, Vector value) { _mm_stream_ps(to, value); }
inline void drain() { _mm_sfence(); }
#else
inline void stream(float* to, Vector value) { std::memcpy(to, &value, sizeof(value)); }
inline void drain() {}
#endif
#include "kernels/cpu/roofline_sweep.inl"
}  // namespace scalar

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
constexpr size_t kVectorBytes = 32;
using Vector = float __attribute__((vector_size(kVectorBytes)));
inline void stream(float* to, Vector value) { _mm256_stream_ps(to, value); }
inline void drain() { _mm_sfence(); }
#include "kernels/cpu/roofline_sweep.inl"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f")
namespace avx512 {
constexpr size_t kVectorBytes = 64;
using Vector = float __attribute__((vector_size(kVectorBytes)));
inline void stream(float* to, Vector value) { _mm512_stream_ps(to, value); }
inline void drain() { _mm_sfence(); }
#include "kernels/cpu/roofline_sweep.inl"
}  // namespace avx512
#pragma GCC pop_options
#endif

}  // namespace

std::vector<InstructionSet> roofline_instruction_sets() {
  std::vector<InstructionSet> sets = {{"baseline", &scalar::sweep}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) sets.push_back({"avx2", &avx2::sweep});
  if (__builtin_cpu_supports("avx512f")) sets.push_back({"avx512", &avx512::sweep});
#endif
  return sets;
}

}  // namespace pycoll::cpu
