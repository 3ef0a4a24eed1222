#include "sync/bell.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace pycoll {

void Bell::ring() {
  rings.fetch_add(1, std::memory_order_seq_cst);
  // Not FUTEX_PRIVATE: the word is shared between processes.
  syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::wait_for_ring(uint32_t before, std::chrono::nanoseconds longest) {
  const timespec limit{static_cast<time_t>(longest.count() / 1'000'000'000),
                       static_cast<long>(longest.count() % 1'000'000'000)};
  // EAGAIN, EINTR and ETIMEDOUT all mean: look again.
  syscall(SYS_futex, &rings, FUTEX_WAIT, before, &limit, nullptr, 0);
}

}  // namespace pycoll
