#include "kernels/cuda/all_gather_quantised.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace pycoll::cuda {
namespace {

// Where nothing travels nothing is quantised.
void launch_copy(const AllGatherQuantisedArgs& args, LaunchConfig config, void* stream) {
  ExchangeDirectArgs copy;
  copy.group = args.group;
  copy.staging = args.staging;
  ChunkTable chunks;
  chunks.begin[0] = args.chunks.begin[0] * itemsize(args.dtype);
  chunks.numel[0] = args.chunks.numel[0] * itemsize(args.dtype);
  fill_all_gather(copy, args.input, args.output, chunks);
  launch_exchange_direct(copy, config, stream);
}

}  // namespace

void launch_all_gather_quantised(const AllGatherQuantisedArgs& args, LaunchConfig config,
                                 void* stream) {
  if (args.group.world_size == 1) return launch_copy(args, config, stream);
  launch_on_wire<AllGatherQuantisedKernel>(args.dtype, args, config, stream);
}

}  // namespace pycoll::cuda
