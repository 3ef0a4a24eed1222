#include "torch/profiler.h"

#include <ATen/record_function.h>

#include "torch/compat.h"

namespace pycoll::torch_adapter {

const char* profiler_title(c10d::OpType type) {
  if (!at::hasCallbacks()) return nullptr;
  if (type == kReduceScatterCoalesced) return "pycoll:reduce_scatter";
  switch (type) {
    case c10d::OpType::ALLREDUCE:
    case c10d::OpType::ALLREDUCE_COALESCED:
    case c10d::OpType::_ALLREDUCE_SPARSE:
      return "pycoll:all_reduce";
    case c10d::OpType::BROADCAST:
      return "pycoll:broadcast";
    case c10d::OpType::ALLGATHER:
    case c10d::OpType::ALLGATHER_COALESCED:
      return "pycoll:all_gather";
    case c10d::OpType::_ALLGATHER_BASE:
      return "pycoll:_all_gather_base";
    case c10d::OpType::REDUCE_SCATTER:
      return "pycoll:reduce_scatter";
    case c10d::OpType::_REDUCE_SCATTER_BASE:
      return "pycoll:_reduce_scatter_base";
    case c10d::OpType::REDUCE:
      return "pycoll:reduce";
    case c10d::OpType::GATHER:
      return "pycoll:gather";
    case c10d::OpType::SCATTER:
      return "pycoll:scatter";
    case c10d::OpType::ALLTOALL:
    case c10d::OpType::ALLTOALL_BASE:
      return "pycoll:all_to_all";
    case c10d::OpType::BARRIER:
      return "pycoll:barrier";
    case c10d::OpType::SEND:
      return "pycoll:send";
    case c10d::OpType::RECV:
      return "pycoll:recv";
    case c10d::OpType::RECVANYSOURCE:
      return "pycoll:recvAnySource";
    default:
      return "pycoll:unknown";
  }
}

}  // namespace pycoll::torch_adapter
