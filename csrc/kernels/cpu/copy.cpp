#include "kernels/cpu/copy.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace pycoll::cpu {
namespace {

constexpr size_t kCacheIfUnknown = size_t{16} << 20;

#if defined(__x86_64__)
constexpr size_t kLine = 64;

// Whole lines, to an aligned destination: each is written at once, by four stores.
void stream_lines(std::byte* dst, const std::byte* src, size_t num_lines) {
  for (size_t i = 0; i < num_lines; ++i) {
    const auto* from = reinterpret_cast<const __m128i*>(src + i * kLine);
    auto* to = reinterpret_cast<__m128i*>(dst + i * kLine);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1),
                  c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  _mm_sfence();
}
#endif

}  // namespace

bool exceeds_cache(size_t nbytes) {
  static const size_t cache = [] {
    const long known = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return known > 0 ? static_cast<size_t>(known) : kCacheIfUnknown;
  }();
  return nbytes > cache;
}

void copy(void* dst, const void* src, size_t nbytes, bool past_cache) {
#if defined(__x86_64__)
  if (past_cache) {
    auto* to = static_cast<std::byte*>(dst);
    const auto* from = static_cast<const std::byte*>(src);
    const size_t head = std::min(nbytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
    std::memcpy(to, from, head);
    const size_t num_lines = (nbytes - head) / kLine;
    stream_lines(to + head, from + head, num_lines);
    const size_t done = head + num_lines * kLine;
    std::memcpy(to + done, from + done, nbytes - done);
    return;
  }
#endif
  (void)past_cache;
  std::memcpy(dst, src, nbytes);
}

}  // namespace pycoll::cpu
