// The kernels of AVX-512, but for sums of bfloat16 that round by the instruction made for it (VCVTNE2PS2BF16). It turns subnormal
// numbers to zero and keeps the payload of a NaN; vectors that have any are left to the kernels of AVX-512, so that bits are the same
// on every CPU.
#include "kernels/cpu/tile_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace pycoll::cpu {
namespace avx512 {
const TileKernels& table();
}

#pragma GCC push_options
// GCC 12 says so of its own intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,f16c,bmi2")

namespace avx512bf16 {
namespace {

constexpr size_t kNumel = 32;  // of a vector

const FusedSum& base() {
  static const FusedSum& kBase = avx512::table().fused_sum[static_cast<int>(DType::kBFloat16)];
  return kBase;
}

// Whether any of 32 sums is subnormal or a NaN.
inline bool any_special(__m512 a, __m512 b) {
  constexpr int kQuietNan = 0x01, kSubnormal = 0x20, kSignallingNan = 0x80;
  constexpr int kClasses = kQuietNan | kSubnormal | kSignallingNan;
  return (_mm512_fpclass_ps_mask(a, kClasses) | _mm512_fpclass_ps_mask(b, kClasses)) != 0;
}

inline __m512 as_floats(__m512i words) { return _mm512_castsi512_ps(words); }

inline __m512 widen(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Two bfloat16 are one word, as in add_bf16 of tile_kernels.inl: even elements are added apart from odd ones, and the results
// interleaved.
void both(void* dst, const void* a, const void* b, size_t numel) {
  auto* const out = static_cast<uint16_t*>(dst);
  auto* const x = static_cast<const uint16_t*>(a);
  auto* const y = static_cast<const uint16_t*>(b);
  const __m512i upper_half = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  // Element 2 i of the result is element i, element 2 i + 1 is element 16 + i.
  const __m512i order = _mm512_add_epi32(
      _mm512_set1_epi32(16 << 16),
      _mm512_mullo_epi32(_mm512_set1_epi32(0x00010001),
                         _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
  size_t i = 0;
  for (; i + kNumel <= numel; i += kNumel) {
    const __m512i p = _mm512_loadu_si512(x + i), q = _mm512_loadu_si512(y + i);
    const __m512 even =
        _mm512_add_ps(as_floats(_mm512_slli_epi32(p, 16)), as_floats(_mm512_slli_epi32(q, 16)));
    const __m512 odd = _mm512_add_ps(as_floats(_mm512_and_si512(p, upper_half)),
                                     as_floats(_mm512_and_si512(q, upper_half)));
    if (__builtin_expect(any_special(even, odd), false)) {
      base().both(out + i, x + i, y + i, kNumel);
      continue;
    }
    const __m512i rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    _mm512_storeu_si512(out + i, _mm512_permutexvar_epi16(order, rounded));
  }
  if (i < numel) base().both(out + i, x + i, y + i, numel - i);
}

void finish(void* dst, const void* sum, const void* b, size_t numel) {
  auto* const out = static_cast<uint16_t*>(dst);
  auto* const x = static_cast<const float*>(sum);
  auto* const y = static_cast<const uint16_t*>(b);
  size_t i = 0;
  for (; i + kNumel <= numel; i += kNumel) {
    const __m512 lower = _mm512_add_ps(_mm512_loadu_ps(x + i), widen(y + i));
    const __m512 upper = _mm512_add_ps(_mm512_loadu_ps(x + i + 16), widen(y + i + 16));
    if (__builtin_expect(any_special(lower, upper), false)) {
      base().finish(out + i, x + i, y + i, kNumel);
    } else {
      _mm512_storeu_si512(out + i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(upper, lower)));
    }
  }
  if (i < numel) base().finish(out + i, x + i, y + i, numel - i);
}

}  // namespace

const TileKernels& table() {
  static const TileKernels kTable = [] {
    TileKernels table = avx512::table();
    table.instruction_set = "avx512bf16";
    FusedSum& sums = table.fused_sum[static_cast<int>(DType::kBFloat16)];
    sums.both = both;
    sums.finish = finish;
    return table;
  }();
  return kTable;
}

}  // namespace avx512bf16
#pragma GCC diagnostic pop
#pragma GCC pop_options
}  // namespace pycoll::cpu
#endif
