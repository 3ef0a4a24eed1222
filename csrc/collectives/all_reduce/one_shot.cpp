// all_reduce, one shot: every rank shows its whole tensor, and every rank reduces all of them by itself.
//
// Small tensors travel beside the handshake's signal, so a call costs one wait for each peer. Larger ones go in blocks through
// staging. Each rank reads (n - 1) times the tensor: only small tensors gain. Every rank adds in rank order, so the fixed
// bracketing is kept.
#include <vector>

#include "collectives/reduction.h"
#include "collectives/staged_exchange.h"

namespace pycoll {
namespace {

void publish(const Context& context) {
  const Request& request = context.request;
  const size_t nbytes = request.nbytes();
  if (!context.fits_payload(nbytes)) return;
  request.input.copy_from_chunk(context.my_payload(nbytes), 0, 0, request.numel,
                                request.itemsize());
  context.count_written(nbytes);
}

void reduce_payloads(const Context& context) {
  const size_t nbytes = context.request.nbytes();
  std::vector<const std::byte*> sources(static_cast<size_t>(context.world_size()));
  for (int r = 0; r < context.world_size(); ++r) {
    sources[static_cast<size_t>(r)] = context.payload(r, nbytes);
  }
  reduce_in_rank_order(context, {0, 0, context.request.numel, 0}, sources.data(), nullptr);
  context.count_read((sources.size() - 1) * nbytes);
}

Task run(Context context) {
  const Request& request = context.request;
  if (context.fits_payload(request.nbytes())) {
    reduce_payloads(context);
    co_return;
  }
  const size_t itemsize = request.itemsize();
  const size_t block_numel = context.group.facts().staging_bytes / itemsize;
  const auto numel_of = [&](size_t block) {
    return std::min(block_numel, request.numel - block * block_numel);
  };
  StagedExchange exchange(context, block_numel * itemsize, ceil_div(request.numel, block_numel));
  std::vector<const std::byte*> sources(static_cast<size_t>(context.world_size()));
  const auto write = [&](size_t block, std::byte* slot) {
    request.input.copy_from_chunk(slot, 0, block * block_numel, numel_of(block), itemsize);
    context.count_written(numel_of(block) * itemsize);
  };
  const auto read = [&](size_t block) {
    for (int r = 0; r < context.world_size(); ++r) {
      sources[static_cast<size_t>(r)] = r == context.rank() ? nullptr : exchange.slot_of(r, block);
    }
    reduce_in_rank_order(context, {0, block * block_numel, numel_of(block), block * block_numel},
                         sources.data(), nullptr);
    context.count_read((sources.size() - 1) * numel_of(block) * itemsize);
  };
  co_await exchange.run(write, read);
}

}  // namespace

const Algorithm kAllReduceOneShot{"one_shot", Collective::kAllReduce, publish, run};

}  // namespace pycoll
