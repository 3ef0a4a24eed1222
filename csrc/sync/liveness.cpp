#include "sync/liveness.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pycoll {
namespace {

UniqueFd open_pidfd(int pid) {
  if (pid <= 0) return UniqueFd();
  // Fails on kernels before 5.3 and for a process that is already gone; the socket tells in both cases.
  return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace

Liveness::Liveness(UniqueFd socket, int pid)
    : socket_(std::move(socket)), pidfd_(open_pidfd(pid)), pid_(pid) {}

bool Liveness::alive() const {
  if (dead_.load(std::memory_order_relaxed)) return false;
  // Nothing is sent over the socket after the exchange, so readable means closed. poll() skips negative descriptors.
  pollfd fds[2] = {{socket_.get(), POLLIN | POLLRDHUP, 0}, {pidfd_.get(), POLLIN, 0}};
  if (poll(fds, 2, 0) > 0 && (fds[0].revents != 0 || fds[1].revents != 0)) {
    dead_.store(true, std::memory_order_relaxed);
    return false;
  }
  return true;
}

}  // namespace pycoll
