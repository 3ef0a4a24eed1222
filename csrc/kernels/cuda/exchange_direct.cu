#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/exchange_direct.cuh"

namespace pycoll::cuda {

void launch_exchange_direct(const ExchangeDirectArgs& args, LaunchConfig config, void* stream) {
  uint64_t bits = 0;
  for (int rank = 0; rank < args.group.world_size; ++rank) {
    bits |= address_bits(args.send[rank]) | address_bits(args.receive[rank]) |
            args.send_bytes[rank] | args.receive_bytes[rank];
  }
  launch_mover<ExchangeDirectKernel>(bits, args, config, stream);
}

}  // namespace pycoll::cuda
