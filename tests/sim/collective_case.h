// One collective, run by a group of simulated ranks and compared with plain loops.
#pragma once

#include <string>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "kernels/cuda/launch.h"
#include "simulation.h"

namespace pycoll::sim {

enum class Kernel {
  kAllReduceOneShot,
  kAllReduceTwoShot,
  kAllReduceRing,
  kReduceScatterDirect,
  kReduceScatterRing,
  kAllGatherDirect,
  kAllGatherRing,
  kAllToAll,
  kBroadcast,
};
inline constexpr int kNumKernels = static_cast<int>(Kernel::kBroadcast) + 1;
const char* name(Kernel kernel);
inline bool is_ring(Kernel kernel) {
  return kernel == Kernel::kAllReduceRing || kernel == Kernel::kReduceScatterRing ||
         kernel == Kernel::kAllGatherRing;
}
// Kernels that know quantised wires.
inline bool quantises(Kernel kernel) {
  return kernel == Kernel::kAllReduceOneShot || kernel == Kernel::kAllReduceTwoShot ||
         kernel == Kernel::kReduceScatterDirect || kernel == Kernel::kAllGatherDirect;
}
inline bool reduces(Kernel kernel) { return kernel <= Kernel::kReduceScatterRing; }

struct CollectiveCase {
  Kernel kernel = Kernel::kAllReduceOneShot;
  cuda::Protocol protocol = cuda::Protocol::kSimple;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  cuda::WireFormat wire = {};
  int world_size = 2;
  size_t numel = 17;        // of all_reduce and broadcast; elsewhere of the largest chunk
  size_t shift = 0;         // elements between a multiple of 16 bytes and the data
  bool tells_lead = false;  // the kernels know the shift
  bool in_place = false;
  int num_blocks = 2;
  int threads_per_block = 32;
  size_t slot_units = 8;
  int num_calls = 2;  // one after another, on the same memory
  uint32_t first_epoch = 0;

  std::string text() const;
};

// Empty, or what went wrong.
std::string run_case(const CollectiveCase& what, const Options& options,
                     uint64_t* accesses = nullptr);

}  // namespace pycoll::sim
