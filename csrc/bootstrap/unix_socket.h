// Local sockets: they carry a file descriptor once, and then only tell when the other process is gone.
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.h"
#include "bootstrap/exchange.h"

namespace pycoll {

// A file descriptor that is closed with its owner.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();

 private:
  int fd_ = -1;
};

struct PeerCredentials {
  int pid = 0;  // 0: not visible from this process's PID namespace
  uint32_t uid = 0;
};

// Listens under an abstract name (no file): the kernel removes it with the process.
UniqueFd listen_abstract(const std::string& name);

// Connects to a listener; an empty UniqueFd if nobody listens under that name in this network namespace.
UniqueFd connect_abstract(const std::string& name);

// The next connection, or an empty UniqueFd after `patience`.
UniqueFd accept_connection(const UniqueFd& listener, std::chrono::milliseconds patience);

PeerCredentials peer_credentials(const UniqueFd& socket);

// One message of `nbytes` with a descriptor. Small enough that the socket's buffer takes it whole.
void send_with_fd(const UniqueFd& socket, const void* data, size_t nbytes, int fd);

// Receives exactly such a message; raises kTimeout at the deadline, kPeerFailed when the other side is gone.
UniqueFd receive_with_fd(const UniqueFd& socket, void* data, size_t nbytes, Deadline deadline,
                         const InterruptCheck& interrupt);

}  // namespace pycoll
