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

void fill_all_gather(ExchangeDirectArgs& args, const void* input, void* output,
                     const ChunkTable& chunks) {
  for (int rank = 0; rank < args.group.world_size; ++rank) {
    args.send[rank] = input;
    args.send_bytes[rank] = chunks.numel[args.group.rank];
    args.receive[rank] = static_cast<std::byte*>(output) + chunks.begin[rank];
    args.receive_bytes[rank] = chunks.numel[rank];
  }
}

void fill_broadcast(ExchangeDirectArgs& args, const void* input, void* output, size_t nbytes,
                    int root) {
  for (int rank = 0; rank < args.group.world_size; ++rank) {
    args.send[rank] = input;
    args.send_bytes[rank] = args.group.rank == root ? nbytes : 0;
    args.receive[rank] = rank == root ? output : nullptr;
    args.receive_bytes[rank] = rank == root ? nbytes : 0;
  }
}

}  // namespace pycoll::cuda
