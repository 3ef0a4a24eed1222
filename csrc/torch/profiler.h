// How calls are called in a profile.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace pycoll::torch_adapter {

// Null where nobody profiles.
const char* profiler_title(c10d::OpType type);

}  // namespace pycoll::torch_adapter
