// reduce_scatter, direct: every rank shows all chunks of its input but its own; rank r reduces chunk r of all ranks. Beside the
// handshake's signal where the whole input fits, else in blocks through staging. Reads n - 1 chunks a rank, the least that is
// possible, and adds in rank order: the fixed bracketing is kept.
#include <vector>

#include "collectives/reduction.h"
#include "collectives/staged_exchange.h"

namespace pycoll {
namespace {

size_t input_bytes(const Context& context) {
  return context.request.nbytes() * static_cast<size_t>(context.world_size());
}

// Copies elements [begin, begin + numel) of each chunk but this rank's own to `slot`, chunk c at c * stride.
void show_chunks(const Context& context, size_t begin, size_t numel, std::byte* slot,
                 size_t stride) {
  const Request& request = context.request;
  for (int r = 0; r < context.world_size(); ++r) {
    if (r == context.rank()) continue;
    request.input.copy_from_chunk(slot + static_cast<size_t>(r) * stride, static_cast<size_t>(r),
                                  begin, numel, request.itemsize());
    context.count_written(numel * request.itemsize());
  }
}

// Reduces the same elements of this rank's chunk; slot_of(r) is what rank r showed.
template <class SlotOf>
void reduce_chunk(const Context& context, size_t begin, size_t numel, size_t stride,
                  const SlotOf& slot_of) {
  const size_t me = static_cast<size_t>(context.rank());
  std::vector<const std::byte*> sources(static_cast<size_t>(context.world_size()));
  for (int r = 0; r < context.world_size(); ++r) {
    sources[static_cast<size_t>(r)] = r == context.rank() ? nullptr : slot_of(r) + me * stride;
  }
  reduce_in_rank_order(context, {me, begin, numel, begin}, sources.data(), nullptr);
  context.count_read((sources.size() - 1) * numel * context.request.itemsize());
}

void publish(const Context& context) {
  if (!context.fits_payload(input_bytes(context))) return;
  const Request& request = context.request;
  show_chunks(context, 0, request.numel, context.my_payload(input_bytes(context)),
              request.nbytes());
}

Task run(Context context) {
  const Request& request = context.request;
  if (context.fits_payload(input_bytes(context))) {
    reduce_chunk(context, 0, request.numel, request.nbytes(),
                 [&](int r) { return context.payload(r, input_bytes(context)); });
    co_return;
  }
  const size_t n = static_cast<size_t>(context.world_size());
  const size_t block_numel =
      std::max<size_t>(1, context.group.facts().staging_bytes / n / request.itemsize());
  const size_t stride = round_up(block_numel * request.itemsize(), 64);
  const auto numel_of = [&](size_t block) {
    return std::min(block_numel, request.numel - block * block_numel);
  };
  StagedExchange exchange(context, n * stride, ceil_div(request.numel, block_numel));
  const auto write = [&](size_t block, std::byte* slot) {
    show_chunks(context, block * block_numel, numel_of(block), slot, stride);
  };
  const auto read = [&](size_t block) {
    reduce_chunk(context, block * block_numel, numel_of(block), stride,
                 [&](int r) { return exchange.slot_of(r, block); });
  };
  co_await exchange.run(write, read);
}

}  // namespace

const Algorithm kReduceScatterDirect{"direct", Collective::kReduceScatter, publish, run};

}  // namespace pycoll
