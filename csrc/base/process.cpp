#include "base/process.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/random.h>

#include <atomic>
#include <mutex>

#include "base/error.h"

namespace pycoll {
namespace {

std::atomic<uint32_t> g_fork_epoch{0};

void install_fork_handler() {
  static const int installed = pthread_atfork(
      nullptr, nullptr, [] { g_fork_epoch.fetch_add(1, std::memory_order_relaxed); });
  (void)installed;
}

}  // namespace

Token random_token() {
  Token token;
  size_t have = 0;
  while (have < token.size()) {
    const ssize_t got = getrandom(token.data() + have, token.size() - have, 0);
    if (got < 0 && errno != EINTR) {
      fail(ErrorKind::kSystem, "getrandom failed: ", errno_text(errno));
    }
    if (got > 0) have += static_cast<size_t>(got);
  }
  return token;
}

Token address_space_token() {
  static std::mutex mutex;
  static uint32_t epoch;
  static Token token = (epoch = fork_epoch(), random_token());
  std::lock_guard<std::mutex> lock(mutex);
  if (epoch != fork_epoch()) {
    epoch = fork_epoch();
    token = random_token();
  }
  return token;
}

uint32_t fork_epoch() {
  install_fork_handler();
  return g_fork_epoch.load(std::memory_order_relaxed);
}

void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace pycoll
