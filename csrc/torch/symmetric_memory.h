// torch's symmetric memory for CPU tensors: torch.distributed._symmetric_memory and torch.ops.symm_mem.
#pragma once

#include <memory>
#include <string>

#include "engine/communicator.h"

namespace pycoll::torch_adapter {

// Makes the shared heap torch's symmetric memory of the CPU, unless another library has done so already.
void register_symmetric_memory();

// The communicator of the group `group_name`. Raises kInvalidArgument if its backend for the CPU is not pycoll's.
std::shared_ptr<Communicator> communicator_of(const std::string& group_name);

}  // namespace pycoll::torch_adapter
