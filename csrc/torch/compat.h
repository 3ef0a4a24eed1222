// Names that differ between the versions of torch that pycoll compiles with (2.11 to 2.14).
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/headeronly/version.h>

namespace pycoll::torch_adapter {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
inline constexpr c10d::OpType kReduceScatterCoalesced = c10d::OpType::REDUCE_SCATTER;
#else
inline constexpr c10d::OpType kReduceScatterCoalesced =
    c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#endif

// The old name stays as an alias of the new one.
using PremulSumSupplement = c10d::NCCLPreMulSumSupplement;

}  // namespace pycoll::torch_adapter
