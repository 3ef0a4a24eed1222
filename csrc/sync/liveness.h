// Whether another process still lives.
#pragma once

#include <atomic>

#include "bootstrap/unix_socket.h"

namespace pycoll {

// One peer process: its socket (end-of-file when its last holder is gone) and, where its pid is visible, a pidfd (which
// also tells when a forked child still holds the socket). Once seen dead it stays dead.
class Liveness {
 public:
  Liveness(UniqueFd socket, int pid);

  bool alive() const;
  int pid() const { return pid_; }

 private:
  UniqueFd socket_;
  UniqueFd pidfd_;
  const int pid_;
  mutable std::atomic<bool> dead_{false};
};

}  // namespace pycoll
