// all_to_all, direct: every rank shows one chunk for each other rank, each copies what is meant for it. Each byte is written
// once and read once.
//
// Beside the signal every rank first shows how many elements it sends to each rank and expects from it; all compare all
// pairs, so that all raise or none, before a byte of the tensors moves. Behind these counts go the chunks themselves, packed,
// where they fit; if those of one rank do not, where each lies, and all are read there or, if one is not reachable, go through staging.
#include <vector>

#include "collectives/chunk_blocks.h"
#include "collectives/peer_tensors.h"
#include "collectives/staged_exchange.h"

namespace pycoll {
namespace {

size_t counts_bytes(const Context& context) {
  return 2 * static_cast<size_t>(context.world_size()) * sizeof(uint64_t);
}

// Beside the signal of `rank`: its counts, then (maybe) its chunks.
std::byte* area_of(const Context& context, int rank) {
  return GroupPage::payload(context.group.handshake_line(rank, context.sequence),
                            counts_bytes(context));
}

void copy_own(const Context& context) {
  const Request& request = context.request;
  const size_t me = static_cast<size_t>(context.rank());
  const size_t itemsize = request.itemsize();
  const bool past_cache = goes_past_cache(context);
  request.input.for_each_run(
      me, 0, request.input.numel(me), itemsize, [&](std::byte* data, size_t offset, size_t numel) {
        request.output.for_each_run(
            me, offset, numel, itemsize, [&](std::byte* out, size_t inner, size_t n) {
              cpu::copy(out, data + inner * itemsize, n * itemsize, past_cache);
            });
      });
}

// Whether `numel` elements fit beside the signal, behind the counts.
bool fits_payload(const Context& context, size_t numel) {
  return context.fits_payload(counts_bytes(context) + numel * context.request.itemsize());
}

// Whether there is room for addresses behind the counts, which depends on what all agree on.
bool has_room_for_addresses(const Context& context) {
  const size_t n = static_cast<size_t>(context.world_size());
  return context.fits_payload(counts_bytes(context) + Announcement::nbytes(n));
}

void announce(const Context& context) {
  if (!has_room_for_addresses(context)) return;
  const ChunkView& input = context.request.input;
  Announcement announcement(context);
  for (size_t chunk = 0; chunk < input.num_chunks(); ++chunk) announcement.add(input, chunk);
  announcement.write(area_of(context, context.rank()) + counts_bytes(context));
}

bool publish(const Context& context) {
  const Request& request = context.request;
  const size_t n = request.input.num_chunks();
  std::vector<uint64_t> counts;
  for (size_t r = 0; r < n; ++r) counts.push_back(request.input.numel(r));
  for (size_t r = 0; r < n; ++r) counts.push_back(request.output.numel(r));
  std::byte* area = area_of(context, context.rank());
  std::memcpy(area, counts.data(), counts_bytes(context));
  const size_t itemsize = request.itemsize();
  if (!fits_payload(context, request.input.total_numel())) {
    announce(context);
    return false;
  }
  std::byte* chunks = area + counts_bytes(context);
  for (size_t r = 0; r < n; ++r) {
    request.input.copy_from_chunk(chunks + packed_begin(request.input, r) * itemsize, r, 0,
                                  counts[r], itemsize);
    if (static_cast<int>(r) != context.rank()) context.count_written(counts[r] * itemsize);
  }
  return false;  // whether others need this rank once more depends on what they send
}

// What all ranks send, as all of them have shown it.
class Counts {
 public:
  explicit Counts(const Context& context) : n_(context.world_size()) {
    for (int r = 0; r < n_; ++r) {
      const std::byte* area = area_of(context, r);
      const size_t old = numbers_.size();
      numbers_.resize(old + 2 * static_cast<size_t>(n_));
      std::memcpy(numbers_.data() + old, area, counts_bytes(context));
    }
  }
  size_t sent(int src, int dst) const { return at(src, dst); }
  size_t expected(int dst, int src) const { return at(dst, n_ + src); }
  size_t largest_chunk() const {
    size_t most = 0;
    for (int src = 0; src < n_; ++src) {
      for (int dst = 0; dst < n_; ++dst) most = std::max(most, sent(src, dst));
    }
    return most;
  }
  // Of what `src` sends.
  size_t total(int src) const {
    size_t total = 0;
    for (int dst = 0; dst < n_; ++dst) total += sent(src, dst);
    return total;
  }
  // Of the rank that sends most.
  size_t largest_total() const {
    size_t most = 0;
    for (int src = 0; src < n_; ++src) most = std::max(most, total(src));
    return most;
  }
  // Of the elements that `src` sends, the first that goes to `dst`.
  size_t begin(int src, int dst) const {
    size_t begin = 0;
    for (int r = 0; r < dst; ++r) begin += sent(src, r);
    return begin;
  }

 private:
  size_t at(int rank, int index) const {
    return numbers_[static_cast<size_t>(rank) * 2 * static_cast<size_t>(n_) +
                    static_cast<size_t>(index)];
  }
  const int n_;
  std::vector<uint64_t> numbers_;
};

// Raises kMismatch, on all ranks alike, where one sends what the other does not expect.
void compare_counts(const Context& context, const Counts& counts) {
  const int n = context.world_size();
  std::string text;
  for (int src = 0; src < n; ++src) {
    for (int dst = 0; dst < n; ++dst) {
      if (counts.sent(src, dst) == counts.expected(dst, src)) continue;
      text += concat(" rank ", src, " sends ", counts.sent(src, dst), " elements to rank ", dst,
                     ", which expects ", counts.expected(dst, src), ";");
    }
  }
  if (text.empty()) return;
  fail(ErrorKind::kMismatch, "operation ", context.sequence,
       " of this group, all_to_all, does not fit together:", text,
       " nothing was moved and the group stays usable. Give both ranks split sizes that agree");
}

void copy_from_payload(const Context& context, const Counts& counts, int rank) {
  const Request& request = context.request;
  const int me = context.rank();
  const size_t itemsize = request.itemsize();
  const std::byte* chunks = area_of(context, rank) + counts_bytes(context);
  request.output.copy_to_chunk(chunks + counts.begin(rank, me) * itemsize,
                               static_cast<size_t>(rank), 0, counts.sent(rank, me), itemsize);
  context.count_read(counts.sent(rank, me) * itemsize);
}

// Those that sent little have shown it beside their signal.
PeerTensors find_tensors(const Context& context, const Counts& counts) {
  return PeerTensors(context, static_cast<size_t>(context.world_size()),
                     [&](int r) -> const std::byte* {
                       if (fits_payload(context, counts.total(r))) return nullptr;
                       return area_of(context, r) + counts_bytes(context);
                     });
}

void copy_from_tensors(const Context& context, const Counts& counts, const PeerTensors& tensors) {
  const Group::Touching touching(context.group);
  const Request& request = context.request;
  const int me = context.rank();
  const size_t itemsize = request.itemsize();
  for (int step = 1; step < context.world_size(); ++step) {
    const int r = (me + step) % context.world_size();
    if (fits_payload(context, counts.total(r))) {
      copy_from_payload(context, counts, r);
      continue;
    }
    request.output.for_each_run(static_cast<size_t>(r), 0, counts.sent(r, me), itemsize,
                                [&](std::byte* data, size_t offset, size_t numel) {
                                  tensors.read(touching, r, static_cast<size_t>(me),
                                               offset * itemsize, data, numel * itemsize);
                                });
  }
}

Task run(Context context) {
  const Request& request = context.request;
  const size_t n = static_cast<size_t>(context.world_size());
  const size_t me = static_cast<size_t>(context.rank());
  const size_t itemsize = request.itemsize();
  const Counts counts(context);
  compare_counts(context, counts);
  copy_own(context);
  if (fits_payload(context, counts.largest_total())) {
    for (int r = 0; r < context.world_size(); ++r) {
      if (r != context.rank()) copy_from_payload(context, counts, r);
    }
    co_return;
  }
  if (has_room_for_addresses(context)) {
    const PeerTensors tensors = find_tensors(context, counts);
    if (tensors.are_reachable()) {
      copy_from_tensors(context, counts, tensors);
      co_await PeerTensors::finish(context);
      co_return;
    }
  }
  const ChunkBlocks blocks(context, counts.largest_chunk());
  StagedExchange exchange(context, n * blocks.stride, blocks.num_blocks);
  // What went beside the signal and is not used does not count.
  context.event.bytes_written = 0;
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
