#include "kernels/cuda/all_gather_ring.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace pycoll::cuda {

void launch_all_gather_ring(const AllGatherRingArgs& args, LaunchConfig config, void* stream) {
  check_lead(args.lead_bytes, 1);
  uint64_t bits = address_bits(args.input) | address_bits(args.output) | args.lead_bytes;
  for (int rank = 0; rank < args.group.world_size; ++rank)
    bits |= args.chunks.begin[rank] | args.chunks.numel[rank];
  if (args.protocol == Protocol::kLL128) {
    launch_mover<AllGatherRingLL128Kernel>(bits, args, config, stream);
  } else {
    launch_mover<AllGatherRingSimpleKernel>(bits, args, config, stream);
  }
}

}  // namespace pycoll::cuda
