// Every environment variable that pycoll reads, in one place: kEnvVariables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pycoll {

enum class LogLevel : uint8_t { kOff, kWarn, kInfo, kDetail };

struct EnvVariable {
  const char* name;
  const char* default_value;
  bool
      agreed;  // rank 0's value holds for a group; a rank that sets another one is refused when the group is made
  const char* meaning;
};

inline constexpr EnvVariable kEnvVariables[] = {
    {"PYCOLL_ALGORITHM", "auto", true,
     "algorithm of groups made without Options: auto, direct, one_shot, two_shot or ring"},
    {"PYCOLL_PAYLOAD_BYTES", "16384", true,
     "bytes that travel beside a handshake's signal, 64 to 1 MiB"},
    {"PYCOLL_STAGING_BYTES", "262144", true, "bytes of one staging slot, 4 KiB to 64 MiB"},
    {"PYCOLL_EAGER_BYTES", "16384", true,
     "send() returns before its recv() up to this size, 64 to 1 MiB"},
    {"PYCOLL_MEMORY_PATH", "auto", true,
     "how peers may reach tensors: staged (never directly), mapped (those in shared memory), auto "
     "(also others, "
     "through process_vm_readv, where the kernel allows it)"},
    {"PYCOLL_SHARED_ALLOC", "0", false,
     "1: CPU tensors above 16 KiB come from shared memory, as with pycoll.shared_allocator()"},
    {"PYCOLL_TUNING", "", true,
     "file of `pycoll tune-collectives` that chooses algorithms; off: none; empty: this machine's "
     "in the cache folder, if there is one"},
    {"PYCOLL_CUDA_ALGORITHM", "", true,
     "kernels of CUDA tensors: auto, direct, one_shot, two_shot, ring, ring_ll128 or multimem; "
     "empty: the group's algorithm"},
    {"PYCOLL_CUDA_TUNING", "", true,
     "JSON file that chooses kernels and grids of CUDA tensors (docs/cuda_path.md); empty: the "
     "library's own table"},
    {"PYCOLL_SEGMENT_BYTES", "68719476736", false,
     "address space reserved for the shared memory of one process"},
    {"PYCOLL_SPIN_US", "50", false,
     "microseconds a waiter spins before it sleeps; with more ranks than cores it yields instead"},
    {"PYCOLL_CORES", "", false, "cores to count on; empty: affinity and cgroup quota"},
    {"PYCOLL_DEBUG", "WARN", false,
     "OFF, WARN, INFO or DETAIL: what is logged to stderr; DETAIL (agreed) also compares where in "
     "the program ranks call"},
    {"PYCOLL_FLIGHT_RECORD", "", false,
     "a path's beginning: failures and SIGUSR1 write what happened to it + rank"},
};

// What an operation may do without staging; each value includes those before it.
enum class DirectAccess : uint8_t { kNone, kMapped, kReadv };

struct Env {
  std::string algorithm = "auto";
  std::string cuda_algorithm;  // empty: as `algorithm`
  DirectAccess direct_access = DirectAccess::kReadv;
  size_t payload_bytes = 16 << 10;
  size_t staging_bytes = 256 << 10;
  size_t eager_bytes = 16 << 10;
  size_t segment_bytes = size_t{64} << 30;
  int spin_us = 50;
  int cores = 0;  // 0: ask the system

  // Reads the environment of now; a value that does not parse or is out of range raises, naming variable, value and range.
  static Env read();
};

LogLevel parse_log_level(const std::string& text);

}  // namespace pycoll
