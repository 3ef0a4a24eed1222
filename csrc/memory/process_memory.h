// Memory of another process that is not mapped here: process_vm_readv(2) and process_vm_writev(2).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/process.h"

namespace pycoll {

// Copy between this process and addresses of process `pid`. Raise kPeerFailed when it has ended, kSystem when the kernel refuses.
void read_process(int pid, uint64_t address, void* dst, size_t nbytes);
void write_process(int pid, uint64_t address, const void* src, size_t nbytes);

// What a process shows so that others can try: the address of a token, and the token.
struct ProbeTarget {
  uint64_t address = 0;
  Token token{};
};

// This process's. Lets processes of the same user through where Yama would stop them.
ProbeTarget offer_probe();
// Whether memory of process `pid` can be read and written from here.
bool probe(int pid, const ProbeTarget& target);

}  // namespace pycoll
