// Every environment variable that pycoll reads, in one place. Rank 0's values of those marked "agreed" hold for the whole
// group; a rank that sets another value is refused when the group is made.
//
// | variable             | default | agreed | meaning                                                                |
// |----------------------|---------|--------|------------------------------------------------------------------------|
// | PYCOLL_ALGORITHM     | auto    | yes    | algorithm of groups made without Options (auto, direct, one_shot, two_shot, ring) |
// | PYCOLL_PAYLOAD_BYTES | 16384   | yes    | bytes that travel beside a handshake's signal; 64 to 1 MiB             |
// | PYCOLL_STAGING_BYTES | 262144  | yes    | bytes of one staging slot; 4 KiB to 64 MiB                             |
// | PYCOLL_EAGER_BYTES   | 16384   | yes    | send() returns before its recv() up to this size; 64 to 1 MiB          |
// | PYCOLL_SEGMENT_BYTES | 64 GiB  | no     | address space reserved for one endpoint's shared memory                |
// | PYCOLL_SPIN_US       | 50      | no     | how long a waiter spins before it sleeps; with more ranks than cores it yields instead |
// | PYCOLL_CORES         | usable  | no     | cores to count on, instead of affinity and cgroup quota                |
// | PYCOLL_DEBUG         | WARN    | no     | OFF, WARN, INFO, DETAIL: what is logged to stderr; DETAIL (agreed) also compares where in the program ranks call |
// | PYCOLL_FLIGHT_RECORD | none    | no     | a path's beginning: failures and SIGUSR1 write what happened to it + rank (read by Python) |
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pycoll {

enum class LogLevel : uint8_t { kOff, kWarn, kInfo, kDetail };

struct Env {
  std::string algorithm = "auto";
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
