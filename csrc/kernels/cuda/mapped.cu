#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/mapped.cuh"

namespace pycoll::cuda {

void launch_reduce_mapped(const ReduceMappedArgs& args, LaunchConfig config, void* stream) {
  launch_reduction<ReduceMappedKernel>(args, config, stream);
}

void launch_send_mapped(const SendMappedArgs& args, LaunchConfig config, void* stream) {
  uint64_t bits = args.nbytes | address_bits(args.input);
  for (int rank = 0; rank < args.group.world_size; ++rank)
    bits |= address_bits(args.output.of_rank[rank]);
  launch_mover<SendMappedKernel>(bits, args, config, stream);
}

}  // namespace pycoll::cuda
