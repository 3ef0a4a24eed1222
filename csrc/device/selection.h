// Which kernel a collective takes on a device, with how many blocks. Selection is data: a table for each architecture, tried from
// the top; rows that were measured go before those of the library.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/request.h"

namespace pycoll::device {

enum class Algorithm : uint8_t {
  kDirect,  // every rank writes into slots of each other rank
  kOneShot,
  kTwoShot,
  kRing,
  kRingLL128,
  kMultimem,
  kMapped,  // on symmetric tensors: peers' memory is read and written where it lies
};

const char* name(Algorithm algorithm);

// For collectives of `world_size` ranks on sm_<architecture> and up to `most_nbytes` of this rank's tensor (of all_gather: of the
// input; of reduce_scatter: of the output).
struct Row {
  int architecture;
  int world_size;  // 0: any
  Collective collective;
  Algorithm algorithm;
  int num_blocks;
  uint64_t most_nbytes;
};

// Reads rows "ARCHITECTURE RANKS COLLECTIVE ALGORITHM BLOCKS BYTES" separated by ";", such as "90 8 all_reduce one_shot 8 65536"; as
// RANKS, "any" is every number, as BYTES it is no limit. Raises kInvalidArgument, naming the row, for what is unknown or
// gives up the fixed order of additions. A text that begins with "!" says why there is no table, and is raised.
std::vector<Row> parse_rows(const std::string& text);

// Names that a user may ask for: "auto", and those of the algorithms that are not chosen by where tensors lie.
std::vector<std::string> algorithm_names();

// What all ranks agree on when a group is made ready for a device.
struct Facts {
  int architecture = 0;
  int world_size = 1;
  int most_blocks = 1;             // that all ranks of a device can have at once
  std::string algorithm = "auto";  // what the user asked for
  std::vector<Row> measured;
};

struct Choice {
  Algorithm algorithm = Algorithm::kDirect;
  int num_blocks = 1;
};

// By agreed facts only, and by what ranks compare in the fingerprint. An algorithm that the collective does not have is not
// taken; its own choice is.
Choice select(const Request& request, const Facts& facts);

// How a device of an architecture is used; the simulator's are as small as makes several segments of little data.
struct Sizes {
  int num_blocks;         // at most
  int threads_per_block;  // of kernels that need no others
  size_t slot_units;      // of direct and ring kernels
  size_t one_shot_bytes;  // the most that one-shot takes
};
Sizes sizes_of(int architecture);

}  // namespace pycoll::device
