// Which algorithm an operation takes. Selection is data: a table of rows, tried from the top.
#pragma once

#include <string>
#include <vector>

#include "collectives/algorithm.h"

namespace pycoll {

// All algorithms, in the order of docs/algorithms.md.
const std::vector<const Algorithm*>& algorithms();

// Names that Options(algorithm=...) and PYCOLL_ALGORITHM take: "auto", and those of the algorithms.
std::vector<std::string> algorithm_names();

// Whether the order of additions depends on neither size nor place (docs/algorithms.md). Only such algorithms become defaults.
bool keeps_bracketing(const Algorithm& algorithm);

// Depends on what all ranks agree on only. facts.algorithm names an algorithm for those collectives that have one of that
// name, which takes a wire format if the request has one; "auto", and the others, take that of facts.tuned, else the
// table's, which all keep the fixed bracketing.
const Algorithm& select(const Request& request, const Facts& facts);

}  // namespace pycoll
