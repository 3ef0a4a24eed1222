// reduce_scatter, direct: every rank shows all chunks of its input but its own; rank r reduces chunk r of all ranks. Beside the
// handshake's signal where the whole input fits, else in blocks through staging, or from the inputs themselves where all are reachable. Reads n - 1 chunks a rank, the least that is
// possible, and adds in rank order: the fixed bracketing is kept. Chunks may differ in size.
#include <vector>

#include "collectives/chunk_blocks.h"
#include "collectives/peer_tensors.h"
#include "collectives/reduction.h"
#include "collectives/staged_exchange.h"

namespace pycoll {
namespace {

// Beside a signal, the runs of chunks follow one another: where that of `chunk` begins, in bytes.
size_t run_offset(const Request& request, size_t chunk) {
  size_t offset = 0;
  for (size_t c = 0; c < chunk; ++c) offset += request.wire_nbytes(request.input.numel(c));
  return offset;
}

size_t input_bytes(const Context& context) {
  return run_offset(context.request, context.request.input.num_chunks());
}

// A rank adds its own chunk from its input; if contributions are encoded, its own is, too.
bool is_shown(const Context& context, size_t chunk) {
  return static_cast<int>(chunk) != context.rank() || context.request.wire;
}

void show(const Context& context, size_t chunk, Range range, std::byte* where) {
  write_run(context.request, chunk, range, where);
  if (static_cast<int>(chunk) != context.rank())
    context.count_written(context.request.wire_nbytes(range.numel));
}

// Reduces elements of this rank's chunk; source_of(r) points at those that rank r showed.
template <class SourceOf>
void reduce_own(const Context& context, Range range, const SourceOf& source_of) {
  std::vector<const std::byte*> sources(static_cast<size_t>(context.world_size()));
  for (int r = 0; r < context.world_size(); ++r) {
    const bool own = r == context.rank() && !context.request.wire;
    sources[static_cast<size_t>(r)] = own ? nullptr : source_of(r);
  }
  reduce_in_rank_order(context,
                       {static_cast<size_t>(context.rank()), range.begin, range.numel, range.begin},
                       sources.data(), nullptr);
  context.count_read((sources.size() - 1) * context.request.wire_nbytes(range.numel));
}

bool publish(const Context& context) {
  const Request& request = context.request;
  const size_t nbytes = input_bytes(context);
  const size_t num_chunks = request.input.num_chunks();
  if (!context.fits_payload(nbytes)) {
    Announcement announcement(context);
    for (size_t chunk = 0; chunk < num_chunks; ++chunk) announcement.add(request.input, chunk);
    announcement.write(Announcement::area(context, context.rank(), num_chunks));
    return false;
  }
  std::byte* payload = context.my_payload(nbytes);
  for (size_t chunk = 0; chunk < num_chunks; ++chunk) {
    if (is_shown(context, chunk))
      show(context, chunk, {0, request.input.numel(chunk)}, payload + run_offset(request, chunk));
  }
  return true;
}

// Reachable inputs are mapped (Announcement::path).
void reduce_from_tensors(const Context& context, const PeerTensors& tensors) {
  const Group::Touching touching(context.group);
  const Request& request = context.request;
  const size_t me = static_cast<size_t>(context.rank());
  const size_t itemsize = request.itemsize();
  const size_t block_numel = std::max<size_t>(1, context.group.facts().staging_bytes / itemsize);
  const size_t my_numel = request.input.numel(me);
  for (size_t begin = 0; begin < my_numel; begin += block_numel) {
    if (begin > 0) touching.check();
    const Range block{begin, std::min(block_numel, my_numel - begin)};
    reduce_own(context, block, [&](int r) -> const std::byte* {
      return tensors.address(r, me, block.begin * itemsize, block.numel * itemsize);
    });
  }
}

Task run(Context context) {
  const Request& request = context.request;
  const size_t me = static_cast<size_t>(context.rank());
  const size_t my_numel = request.input.numel(me);
  const size_t nbytes = input_bytes(context);
  if (context.fits_payload(nbytes)) {
    const size_t offset = run_offset(request, me);
    reduce_own(context, {0, my_numel}, [&](int r) { return context.payload(r, nbytes) + offset; });
    co_return;
  }
  const PeerTensors tensors(context, request.input.num_chunks());
  if (tensors.are_reachable()) {
    reduce_from_tensors(context, tensors);
    co_await PeerTensors::finish(context);
    co_return;
  }
  const ChunkBlocks blocks(context, request.input.most_numel());
  const size_t n = static_cast<size_t>(context.world_size());
  StagedExchange exchange(context, n * blocks.stride, blocks.num_blocks);
  const auto write = [&](size_t block, std::byte* slot) {
    for (size_t chunk = 0; chunk < n; ++chunk) {
      const Range strip = blocks.strip(block, request.input.numel(chunk));
      if (is_shown(context, chunk)) show(context, chunk, strip, slot + chunk * blocks.stride);
    }
  };
  const auto read = [&](size_t block) {
    reduce_own(context, blocks.strip(block, my_numel),
               [&](int r) { return exchange.slot_of(r, block) + me * blocks.stride; });
  };
  co_await exchange.run(write, read);
}

}  // namespace

const Algorithm kReduceScatterDirect{"direct", Collective::kReduceScatter, publish, run, true};

}  // namespace pycoll
