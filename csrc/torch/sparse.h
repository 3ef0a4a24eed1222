// all_reduce of sparse COO tensors: ranks gather indices and values of all and add them up, in rank order.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "engine/communicator.h"

namespace pycoll::torch_adapter {

// Blocks until the sum (or average) is in `tensor`, coalesced. Every rank calls it with the same shape and dtype; the number
// of entries may differ, and may be zero. Raises kInvalidArgument for other ops and layouts.
void all_reduce_sparse(Communicator* communicator, at::Tensor& tensor, const c10d::ReduceOp& op,
                       std::chrono::milliseconds timeout);

}  // namespace pycoll::torch_adapter
