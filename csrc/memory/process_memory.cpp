#include "memory/process_memory.h"

#include <errno.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#include <cstdio>

#include "base/error.h"

namespace pycoll {
namespace {

using Transfer = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long,
                             unsigned long);

// The kernel may stop short of the end.
int transfer(Transfer call, int pid, uint64_t address, void* data, size_t nbytes) {
  auto* here = static_cast<std::byte*>(data);
  while (nbytes > 0) {
    const iovec local{here, nbytes};
    const iovec remote{reinterpret_cast<void*>(address), nbytes};
    const ssize_t moved = call(pid, &local, 1, &remote, 1, 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return moved < 0 ? errno : EFAULT;
    here += moved;
    address += static_cast<uint64_t>(moved);
    nbytes -= static_cast<size_t>(moved);
  }
  return 0;
}

void check(int code, int pid, const char* what) {
  if (code == 0) return;
  if (code == ESRCH) fail(ErrorKind::kPeerFailed, "process ", pid, " has ended");
  fail(ErrorKind::kSystem, "cannot ", what, " the memory of process ", pid, ": ", errno_text(code),
       "; set PYCOLL_MEMORY_PATH=mapped on all ranks to do without");
}

// Linux's Yama lets only ancestors through at level 1, unless the target says otherwise.
bool yama_restricts() {
  std::FILE* file = std::fopen("/proc/sys/kernel/yama/ptrace_scope", "re");
  if (file == nullptr) return false;
  const int level = std::fgetc(file);
  std::fclose(file);
  return level == '1';
}

}  // namespace

void read_process(int pid, uint64_t address, void* dst, size_t nbytes) {
  check(transfer(process_vm_readv, pid, address, dst, nbytes), pid, "read");
}

void write_process(int pid, uint64_t address, const void* src, size_t nbytes) {
  check(transfer(process_vm_writev, pid, address, const_cast<void*>(src), nbytes), pid, "write");
}

ProbeTarget offer_probe() {
  static Token token = random_token();
  static const bool restricted = yama_restricts();
  if (restricted) prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  return ProbeTarget{reinterpret_cast<uint64_t>(token.data()), token};
}

bool probe(int pid, const ProbeTarget& target) {
  if (pid <= 0 || target.address == 0) return false;
  Token seen{};
  // What is written is what is there.
  return transfer(process_vm_readv, pid, target.address, seen.data(), seen.size()) == 0 &&
         seen == target.token &&
         transfer(process_vm_writev, pid, target.address, seen.data(), seen.size()) == 0;
}

}  // namespace pycoll
