// Two ranks in two processes: the test's own, and a forked child.
#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <functional>

#include "base/error.h"
#include "bootstrap/exchange.h"
#include "bootstrap/unix_socket.h"
#include "check.h"

namespace pycoll::test {

// Swaps blobs over a pair of sockets.
class PairExchange final : public Exchange {
 public:
  PairExchange(UniqueFd socket, int rank) : socket_(std::move(socket)), rank_(rank) {}
  int rank() const override { return rank_; }
  int world_size() const override { return 2; }

  std::vector<Blob> all_gather(const Blob& mine, Deadline, const InterruptCheck&) override {
    const uint64_t length = mine.size();
    move(write, &length, sizeof(length));
    move(write, mine.data(), mine.size());
    uint64_t other_length = 0;
    move(read, &other_length, sizeof(other_length));
    Blob other(other_length);
    move(read, other.data(), other.size());
    return rank_ == 0 ? std::vector<Blob>{mine, other} : std::vector<Blob>{other, mine};
  }
  bool peek(int, Blob*) override { return false; }

 private:
  template <class Fn, class Pointer>
  void move(Fn fn, Pointer data, size_t nbytes) {
    using Byte =
        std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
    auto* at = reinterpret_cast<Byte*>(data);
    while (nbytes > 0) {
      const ssize_t n = fn(socket_.get(), at, nbytes);
      if (n <= 0) fail(ErrorKind::kPeerFailed, "the other process has closed its socket");
      at += n;
      nbytes -= static_cast<size_t>(n);
    }
  }

  const UniqueFd socket_;
  const int rank_;
};

// Runs fn(exchange) as rank 0 here and as rank 1 in a child. What fails there fails here. `killed`: the child is expected
// to end by SIGKILL, not in good order.
inline void run_two_processes(const std::function<void(Exchange&)>& fn, bool killed = false) {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) std::abort();
  UniqueFd mine(sockets[0]), others(sockets[1]);
  std::fflush(nullptr);
  const pid_t child = fork();
  const int rank = child == 0 ? 1 : 0;
  const int failures = g_failures.load();
  try {
    if (child == 0) mine = UniqueFd();
    PairExchange exchange(std::move(child == 0 ? others : mine), rank);
    if (child != 0) others = UniqueFd();
    fn(exchange);
  } catch (const std::exception& error) {
    CHECK(false, "process of rank %d: %s", rank, error.what());
  }
  // The child leaves without destructors of what it has inherited.
  if (child == 0) _exit(g_failures.load() == failures ? 0 : 1);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
               : WIFEXITED(status) && WEXITSTATUS(status) == 0,
        "the child's status is %#x", static_cast<unsigned>(status));
}

}  // namespace pycoll::test
