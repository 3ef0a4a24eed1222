#include "bootstrap/unix_socket.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <utility>

#include "base/error.h"

namespace pycoll {
namespace {

constexpr std::chrono::milliseconds kSlice{50};

socklen_t abstract_address(const std::string& name, sockaddr_un* address) {
  PYCOLL_CHECK(name.size() + 1 <= sizeof(address->sun_path));
  memset(address, 0, sizeof(*address));
  address->sun_family = AF_UNIX;
  memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

UniqueFd make_socket(int flags) {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0));
  if (!fd) {
    fail(ErrorKind::kSystem, "cannot make a local socket: ", errno_text(errno),
         errno == EMFILE ? "; raise the limit of open files (ulimit -n)" : "");
  }
  return fd;
}

bool wait_readable(int fd, std::chrono::milliseconds patience) {
  pollfd p{fd, POLLIN, 0};
  return poll(&p, 1, static_cast<int>(patience.count())) > 0;
}

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) close(fd_);
    fd_ = other.release();
  }
  return *this;
}

UniqueFd::~UniqueFd() {
  if (fd_ >= 0) close(fd_);
}

int UniqueFd::release() { return std::exchange(fd_, -1); }

UniqueFd listen_abstract(const std::string& name) {
  // Not blocking: of several threads that see a connection, one gets it and the others must not wait for the next.
  UniqueFd fd = make_socket(SOCK_NONBLOCK);
  sockaddr_un address;
  const socklen_t length = abstract_address(name, &address);
  if (bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(fd.get(), 1024) != 0) {
    fail(ErrorKind::kSystem, "cannot listen on a local socket: ", errno_text(errno));
  }
  return fd;
}

UniqueFd connect_abstract(const std::string& name) {
  UniqueFd fd = make_socket(0);
  sockaddr_un address;
  const socklen_t length = abstract_address(name, &address);
  while (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    if (errno == EINTR) continue;
    if (errno == ECONNREFUSED || errno == ENOENT) return UniqueFd();
    fail(ErrorKind::kSystem, "cannot connect to a local socket: ", errno_text(errno));
  }
  return fd;
}

UniqueFd accept_connection(const UniqueFd& listener, std::chrono::milliseconds patience) {
  if (!wait_readable(listener.get(), patience)) return UniqueFd();
  UniqueFd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!fd && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
    fail(ErrorKind::kSystem, "cannot accept a peer's connection: ", errno_text(errno),
         errno == EMFILE ? "; raise the limit of open files (ulimit -n)" : "");
  }
  return fd;
}

PeerCredentials peer_credentials(const UniqueFd& socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    fail(ErrorKind::kSystem, "cannot ask who connected: ", errno_text(errno));
  }
  return PeerCredentials{credentials.pid, credentials.uid};
}

void send_with_fd(const UniqueFd& socket, const void* data, size_t nbytes, int fd) {
  iovec part{const_cast<void*>(data), nbytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(header), &fd, sizeof(int));
  ssize_t sent;
  do {
    sent = sendmsg(socket.get(), &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent != static_cast<ssize_t>(nbytes)) {
    fail(ErrorKind::kPeerFailed, "cannot pass shared memory to a peer: ",
         sent < 0 ? errno_text(errno) : "the message was cut");
  }
}

UniqueFd receive_with_fd(const UniqueFd& socket, void* data, size_t nbytes, Deadline deadline,
                         const InterruptCheck& interrupt) {
  while (!wait_readable(
      socket.get(), std::chrono::duration_cast<std::chrono::milliseconds>(deadline.left(kSlice)))) {
    if (interrupt) interrupt();
    if (deadline.passed())
      fail(ErrorKind::kTimeout, "Timed out waiting for a peer's shared memory");
  }
  iovec part{data, nbytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got;
  do {
    got = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | MSG_WAITALL | MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  UniqueFd fd;
  for (cmsghdr* h = CMSG_FIRSTHDR(&message); h != nullptr; h = CMSG_NXTHDR(&message, h)) {
    if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS &&
        h->cmsg_len == CMSG_LEN(sizeof(int))) {
      int value;
      memcpy(&value, CMSG_DATA(h), sizeof(int));
      fd = UniqueFd(value);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    fail(ErrorKind::kSystem,
         "a peer's shared memory got lost: no descriptor was free to take it; raise the limit of "
         "open files (ulimit -n)");
  }
  if (got != static_cast<ssize_t>(nbytes) || !fd) {
    fail(ErrorKind::kPeerFailed, "a peer closed the connection before it passed its shared memory");
  }
  return fd;
}

}  // namespace pycoll
