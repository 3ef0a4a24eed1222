// The loop that nothing that moves a collective's bytes between ranks of one host can be quicker than: threads, one a rank and
// pinned, that read and write memory all of them map, with the widest vectors of this CPU. What is to be read and written is
// the caller's (docs/performance.md has a table for each collective); there is no protocol, no copy and no selection.
#pragma once

#include <cstddef>
#include <vector>

namespace pycoll::cpu {

// dst[i] = src_0[i] + src_1[i] + … for every destination; float32, and with one source a copy of bytes. Sources and
// destinations are offsets into the mapping, multiples of kRooflineAlignment. A destination may be a source, or apart from all.
struct Transfer {
  std::vector<size_t> sources;
  std::vector<size_t> destinations;
  size_t nbytes = 0;
};

inline constexpr size_t kRooflineAlignment = 64;
inline constexpr size_t kMostOperands = 256;  // sources, or destinations, of a transfer

enum class Store { kOrdinary, kNonTemporal };

struct InstructionSet {
  const char* name;
  void (*sweep)(std::byte* mapping, const Transfer& transfer, Store store);
};

// Those that this CPU can run, narrowest first.
std::vector<InstructionSet> roofline_instruction_sets();

struct Range {
  size_t begin, nbytes;
};

struct RooflineArgs {
  size_t mapping_nbytes = 0;
  // Of each rank: what it writes to (a byte a line, untimed) before each sweep, as a program does that makes a collective's
  // input: so its lines lie in that core's caches, and not where the last sweep left them.
  std::vector<std::vector<Range>> owned;
  std::vector<std::vector<Transfer>> transfers;  // of each rank
  int repetitions = 3;
  double repetition_seconds = 0.02;
};

struct Roofline {
  double seconds;  // of all ranks' transfers and one barrier among them
  Store store;     // the one that was quicker
  const char* instruction_set;
};

// Raises kInvalidArgument for transfers outside the mapping, offsets that are not aligned, no ranks.
Roofline measure_roofline(const RooflineArgs& args);

}  // namespace pycoll::cpu
