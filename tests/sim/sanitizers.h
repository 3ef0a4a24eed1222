// What the simulator tells ThreadSanitizer and AddressSanitizer; nothing in other builds.
//
// The simulator itself is compiled without -fsanitize=thread, kernels and tests with it: all fibers touch the scheduler's data,
// and the scheduler's switches are no synchronisation of the simulated GPU. PYCOLL_SIM_TSAN says that the program is such a build.
#pragma once

#include <cstddef>

#if defined(PYCOLL_SIM_TSAN)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* tag);
void __tsan_release(void* tag);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace pycoll::sim {

#if defined(PYCOLL_SIM_TSAN)
inline constexpr bool kThreadSanitizer = true;
// What was done before release(tag) happens before what is done after acquire(tag).
inline void sanitizer_acquire(void* tag) { __tsan_acquire(tag); }
inline void sanitizer_release(void* tag) { __tsan_release(tag); }
#else
inline constexpr bool kThreadSanitizer = false;
inline void sanitizer_acquire(void*) {}
inline void sanitizer_release(void*) {}
#endif

// While it lives, accesses of this fiber are not looked at: for the simulator's own calls of malloc, memcpy and the like, which
// ThreadSanitizer sees in every object file.
class Unwatched {
 public:
#if defined(PYCOLL_SIM_TSAN)
  Unwatched() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unwatched() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Unwatched() {}
  ~Unwatched() {}
#endif
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitizer = true;
inline void forbid_access(const void* p, size_t nbytes) { __asan_poison_memory_region(p, nbytes); }
inline void allow_access(const void* p, size_t nbytes) { __asan_unpoison_memory_region(p, nbytes); }
#else
inline constexpr bool kAddressSanitizer = false;
inline void forbid_access(const void*, size_t) {}
inline void allow_access(const void*, size_t) {}
#endif

}  // namespace pycoll::sim
