// A measured table of algorithms, which goes before the selector's own. `pycoll tune-collectives` writes it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/request.h"

namespace pycoll {

struct Algorithm;

// For groups of `world_size` ranks: requests of up to `most_nbytes` (of this rank's tensor) take the algorithm.
struct TunedRow {
  int world_size;
  Collective collective;
  const Algorithm* algorithm;
  uint64_t most_nbytes;
};

// Reads rows "RANKS COLLECTIVE ALGORITHM BYTES" that are separated by ";", such as "2 all_reduce one_shot 32768"; as BYTES,
// "any" has no limit. The first row that fits counts. Raises kInvalidArgument, naming the row, for what is unknown, out of
// order (a row that can never be reached), or gives up the fixed bracketing. A
// text that begins with "!" says why there is no table; it is raised, so that the other ranks hear of it.
std::vector<TunedRow> parse_tuning(const std::string& text);

}  // namespace pycoll
