// all_reduce, one shot: every rank shows its whole tensor, and every rank reduces all of them by itself.
//
// Small tensors travel beside the handshake's signal, so a call costs one wait for each peer. Larger ones go in blocks through
// staging. Each rank reads (n - 1) times the tensor: only small tensors gain. Every rank adds in rank order, so the fixed
// bracketing is kept.
#include "collectives/one_shot.h"

#include <vector>

#include "collectives/staged_exchange.h"

namespace pycoll {
namespace {

Task run(Context context) {
  const Request& request = context.request;
  if (context.fits_payload(request.wire_nbytes(request.numel))) {
    reduce_payloads(context);
    co_return;
  }
  const size_t block_numel = run_numel(request, context.group.facts().staging_bytes);
  const auto numel_of = [&](size_t block) {
    return std::min(block_numel, request.numel - block * block_numel);
  };
  StagedExchange exchange(context, request.wire_nbytes(block_numel),
                          ceil_div(request.numel, block_numel));
  std::vector<const std::byte*> sources(static_cast<size_t>(context.world_size()));
  const auto write = [&](size_t block, std::byte* slot) {
    write_run(request, 0, {block * block_numel, numel_of(block)}, slot);
    context.count_written(request.wire_nbytes(numel_of(block)));
  };
  const auto read = [&](size_t block) {
    for (int r = 0; r < context.world_size(); ++r) {
      sources[static_cast<size_t>(r)] = exchange.slot_of(r, block);
    }
    reduce_in_rank_order(context, {0, block * block_numel, numel_of(block), block * block_numel},
                         sources.data(), nullptr);
    context.count_read((sources.size() - 1) * request.wire_nbytes(numel_of(block)));
  };
  co_await exchange.run(write, read);
}

}  // namespace

const Algorithm kAllReduceOneShot{"one_shot", Collective::kAllReduce, publish_input, run, true};

}  // namespace pycoll
