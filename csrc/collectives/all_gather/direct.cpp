// all_gather, direct: every rank shows its tensor, all copy it. Beside the handshake's signal where all tensors fit there, else
// in blocks through staging, or from the tensors themselves where all are reachable. Nothing is forwarded: a rank writes its tensor once and reads those of the others. Tensors may differ in size.
#include "collectives/peer_tensors.h"
#include "collectives/staged_exchange.h"
#include "collectives/wire.h"

namespace pycoll {
namespace {

constexpr size_t kInput = 0;

// The user's input is this rank's chunk of the output; in place it already lies there.
void copy_own(const Context& context) {
  const Request& request = context.request;
  const size_t rank = static_cast<size_t>(context.rank());
  const size_t itemsize = request.itemsize();
  const bool past_cache = goes_past_cache(context);
  request.input.for_each_run(
      0, 0, request.input.numel(0), itemsize, [&](std::byte* data, size_t offset, size_t numel) {
        request.output.for_each_run(
            rank, offset, numel, itemsize, [&](std::byte* out, size_t inner, size_t n) {
              if (out != data + inner * itemsize) {
                cpu::copy(out, data + inner * itemsize, n * itemsize, past_cache);
              }
            });
      });
}

bool publish(const Context& context) {
  const Request& request = context.request;
  const size_t most_bytes = request.wire_nbytes(request.output.most_numel());
  if (!context.fits_payload(most_bytes)) {
    Announcement(context)
        .add(request.input, 0)
        .write(Announcement::area(context, context.rank(), 1));
    return false;
  }
  const size_t numel = request.input.numel(0);
  write_run(request, 0, {0, numel}, context.my_payload(most_bytes));
  context.count_written(request.wire_nbytes(numel));
  return true;
}

// Copies what follows `begin` in the tensors of all peers, at most `most` elements each. What was encoded is read back by its
// own rank, too, so that all end with the same bits.
template <class SourceOf>
void copy_from_peers(const Context& context, size_t begin, size_t most, const SourceOf& source_of) {
  const Request& request = context.request;
  for (int r = 0; r < context.world_size(); ++r) {
    const size_t chunk = static_cast<size_t>(r);
    const size_t all = request.output.numel(chunk);
    if ((r == context.rank() && !request.wire) || begin >= all) continue;
    const Range range{begin, std::min(most, all - begin)};
    read_run(request, chunk, range, source_of(r));
    if (r != context.rank()) context.count_read(request.wire_nbytes(range.numel));
  }
}

// Each rank begins with the one after it, so that not all read from one.
void copy_from_tensors(const Context& context, const PeerTensors& tensors) {
  const Group::Touching touching(context.group);
  const Request& request = context.request;
  const size_t itemsize = request.itemsize();
  for (int step = 1; step < context.world_size(); ++step) {
    const int r = (context.rank() + step) % context.world_size();
    const size_t chunk = static_cast<size_t>(r);
    request.output.for_each_run(chunk, 0, request.output.numel(chunk), itemsize,
                                [&](std::byte* data, size_t offset, size_t numel) {
                                  tensors.read(touching, r, kInput, offset * itemsize, data,
                                               numel * itemsize);
                                });
  }
}

Task run(Context context) {
  const Request& request = context.request;
  const size_t most_numel = request.output.most_numel();
  const size_t most_bytes = request.wire_nbytes(most_numel);
  if (!request.wire) copy_own(context);
  if (context.fits_payload(most_bytes)) {
    copy_from_peers(context, 0, most_numel, [&](int r) { return context.payload(r, most_bytes); });
    co_return;
  }
  const PeerTensors tensors(context, 1);
  if (tensors.are_reachable()) {
    copy_from_tensors(context, tensors);
    co_await PeerTensors::finish(context);
    co_return;
  }
  const size_t block_numel = run_numel(request, context.group.facts().staging_bytes);
  StagedExchange exchange(context, request.wire_nbytes(block_numel),
                          ceil_div(most_numel, block_numel));
  const auto write = [&](size_t block, std::byte* slot) {
    const size_t begin = block * block_numel;
    const size_t all = request.input.numel(0);
    if (begin >= all) return;
    const size_t numel = std::min(block_numel, all - begin);
    write_run(request, 0, {begin, numel}, slot);
    context.count_written(request.wire_nbytes(numel));
  };
  const auto read = [&](size_t block) {
    copy_from_peers(context, block * block_numel, block_numel,
                    [&](int r) { return exchange.slot_of(r, block); });
  };
  co_await exchange.run(write, read);
}

}  // namespace

const Algorithm kAllGatherDirect{"direct", Collective::kAllGather, publish, run, true};

}  // namespace pycoll
