// all_gather, direct: every rank shows its tensor, all copy it. Beside the handshake's signal where it fits, else in blocks
// through staging. Nothing is forwarded: a rank writes its tensor once and reads n - 1 tensors.
#include "collectives/staged_exchange.h"

namespace pycoll {
namespace {

// The user's input is this rank's chunk of the output; in place it already lies there.
void copy_own(const Request& request, size_t rank) {
  const size_t itemsize = request.itemsize();
  request.input.for_each_run(
      0, 0, request.numel, itemsize, [&](std::byte* data, size_t offset, size_t numel) {
        request.output.for_each_run(rank, offset, numel, itemsize,
                                    [&](std::byte* out, size_t inner, size_t n) {
                                      if (out != data + inner * itemsize)
                                        std::memmove(out, data + inner * itemsize, n * itemsize);
                                    });
      });
}

void publish(const Context& context) {
  const Request& request = context.request;
  const size_t nbytes = request.nbytes();
  if (!context.fits_payload(nbytes)) return;
  request.input.copy_from_chunk(context.my_payload(nbytes), 0, 0, request.numel,
                                request.itemsize());
  context.count_written(nbytes);
}

Task run(Context context) {
  const Request& request = context.request;
  const size_t itemsize = request.itemsize();
  const auto copy_from_peers = [&](size_t begin, size_t numel, const auto& source_of) {
    for (int r = 0; r < context.world_size(); ++r) {
      if (r == context.rank()) continue;
      request.output.copy_to_chunk(source_of(r), static_cast<size_t>(r), begin, numel, itemsize);
      context.count_read(numel * itemsize);
    }
  };
  copy_own(request, static_cast<size_t>(context.rank()));
  if (context.fits_payload(request.nbytes())) {
    copy_from_peers(0, request.numel, [&](int r) { return context.payload(r, request.nbytes()); });
    co_return;
  }
  const size_t block_numel = context.group.facts().staging_bytes / itemsize;
  const auto numel_of = [&](size_t block) {
    return std::min(block_numel, request.numel - block * block_numel);
  };
  StagedExchange exchange(context, block_numel * itemsize, ceil_div(request.numel, block_numel));
  const auto write = [&](size_t block, std::byte* slot) {
    request.input.copy_from_chunk(slot, 0, block * block_numel, numel_of(block), itemsize);
    context.count_written(numel_of(block) * itemsize);
  };
  const auto read = [&](size_t block) {
    copy_from_peers(block * block_numel, numel_of(block),
                    [&](int r) { return exchange.slot_of(r, block); });
  };
  co_await exchange.run(write, read);
}

}  // namespace

const Algorithm kAllGatherDirect{"direct", Collective::kAllGather, publish, run};

}  // namespace pycoll
