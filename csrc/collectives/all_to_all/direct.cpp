// all_to_all, direct: every rank shows one chunk for each other rank, each copies what is meant for it. Each byte is written
// once and read once.
//
// Where all chunks have one size the fingerprint says so. Uneven ones first show, beside the signal, how many elements this rank sends to
// each rank and expects from it; all ranks compare all pairs, so that all raise or none, before a byte of the tensors moves.
#include <vector>

#include "collectives/chunk_blocks.h"
#include "collectives/staged_exchange.h"

namespace pycoll {
namespace {

size_t counts_bytes(const Context& context) {
  return 2 * static_cast<size_t>(context.world_size()) * sizeof(uint64_t);
}

void copy_own(const Request& request, size_t me) {
  const size_t itemsize = request.itemsize();
  request.input.for_each_run(me, 0, request.input.numel(me), itemsize,
                             [&](std::byte* data, size_t offset, size_t numel) {
                               request.output.copy_to_chunk(data, me, offset, numel, itemsize);
                             });
}

bool publish(const Context& context) {
  const Request& request = context.request;
  const size_t n = request.input.num_chunks();
  if (request.uneven) {
    std::vector<uint64_t> counts;
    for (size_t r = 0; r < n; ++r) counts.push_back(request.input.numel(r));
    for (size_t r = 0; r < n; ++r) counts.push_back(request.output.numel(r));
    std::memcpy(context.my_payload(counts_bytes(context)), counts.data(), counts_bytes(context));
    return false;
  }
  if (!context.fits_payload(n * request.nbytes())) return false;
  std::byte* payload = context.my_payload(n * request.nbytes());
  for (size_t r = 0; r < n; ++r) {
    if (static_cast<int>(r) == context.rank()) continue;
    request.input.copy_from_chunk(payload + r * request.nbytes(), r, 0, request.numel,
                                  request.itemsize());
    context.count_written(request.nbytes());
  }
  return true;
}

// The largest chunk of any rank. Raises kMismatch, on all ranks alike, where one sends what the other does not expect.
size_t compare_counts(const Context& context) {
  const int n = context.world_size();
  const auto count = [&](int rank, int index) {
    uint64_t value;
    std::memcpy(
        &value,
        context.payload(rank, counts_bytes(context)) + static_cast<size_t>(index) * sizeof(value),
        sizeof(value));
    return value;
  };
  uint64_t most = 0;
  std::string text;
  for (int src = 0; src < n; ++src) {
    for (int dst = 0; dst < n; ++dst) {
      const uint64_t sent = count(src, dst);
      const uint64_t expected = count(dst, n + src);
      most = std::max(most, sent);
      if (sent == expected) continue;
      text += concat(" rank ", src, " sends ", sent, " elements to rank ", dst, ", which expects ",
                     expected, ";");
    }
  }
  if (!text.empty()) {
    fail(ErrorKind::kMismatch, "operation ", context.sequence,
         " of this group, all_to_all, does not fit together:", text,
         " nothing was moved and the group stays usable. Give both ranks split sizes that agree");
  }
  return most;
}

Task run(Context context) {
  const Request& request = context.request;
  const size_t n = static_cast<size_t>(context.world_size());
  const size_t me = static_cast<size_t>(context.rank());
  const size_t itemsize = request.itemsize();
  const size_t most_numel = request.uneven ? compare_counts(context) : request.numel;
  copy_own(request, me);
  if (!request.uneven && context.fits_payload(n * request.nbytes())) {
    for (size_t r = 0; r < n; ++r) {
      if (r == me) continue;
      const std::byte* payload = context.payload(static_cast<int>(r), n * request.nbytes());
      request.output.copy_to_chunk(payload + me * request.nbytes(), r, 0, request.numel, itemsize);
      context.count_read(request.nbytes());
    }
    co_return;
  }
  const ChunkBlocks blocks(context, most_numel);
  if (blocks.num_blocks == 0) co_return;  // nobody sends anything
  StagedExchange exchange(context, n * blocks.stride, blocks.num_blocks);
  const auto write = [&](size_t block, std::byte* slot) {
    for (size_t r = 0; r < n; ++r) {
      const Range strip = blocks.strip(block, request.input.numel(r));
      if (r == me || strip.numel == 0) continue;
      request.input.copy_from_chunk(slot + r * blocks.stride, r, strip.begin, strip.numel,
                                    itemsize);
      context.count_written(strip.numel * itemsize);
    }
  };
  const auto read = [&](size_t block) {
    for (size_t r = 0; r < n; ++r) {
      const Range strip = blocks.strip(block, request.output.numel(r));
      if (r == me || strip.numel == 0) continue;
      const std::byte* slot = exchange.slot_of(static_cast<int>(r), block);
      request.output.copy_to_chunk(slot + me * blocks.stride, r, strip.begin, strip.numel,
                                   itemsize);
      context.count_read(strip.numel * itemsize);
    }
  };
  co_await exchange.run(write, read);
}

}  // namespace

const Algorithm kAllToAllDirect{"direct", Collective::kAllToAll, publish, run};

}  // namespace pycoll
