// scatter, direct: the root shows one chunk a rank, each rank copies its own. Beside the root's signal where all fit, else in
// blocks through the root's staging. A rank's round of block j says, at the root: it is there; elsewhere: it has been read.
#include "collectives/chunk_blocks.h"
#include "collectives/rooted_copy.h"

namespace pycoll {
namespace {

constexpr size_t kSlots = 4;

size_t all_bytes(const Context& context) {
  return context.request.nbytes() * static_cast<size_t>(context.world_size());
}

bool publish(const Context& context) {
  const Request& request = context.request;
  if (!context.fits_payload(all_bytes(context))) {
    RootedCopy::announce(context);
    return false;
  }
  if (context.rank() != request.root) return true;
  std::byte* payload = context.my_payload(all_bytes(context));
  for (size_t chunk = 0; chunk < request.input.num_chunks(); ++chunk) {
    request.input.copy_from_chunk(payload + chunk * request.nbytes(), chunk, 0, request.numel,
                                  request.itemsize());
  }
  context.count_written(all_bytes(context));
  return true;
}

void copy_own(const Request& request) {
  const size_t itemsize = request.itemsize();
  request.input.for_each_run(static_cast<size_t>(request.root), 0, request.numel, itemsize,
                             [&](std::byte* data, size_t offset, size_t numel) {
                               request.output.copy_to_chunk(data, 0, offset, numel, itemsize);
                             });
}

Task run(Context context) {
  const Request& request = context.request;
  Group& group = context.group;
  const size_t me = static_cast<size_t>(context.rank());
  const size_t n = static_cast<size_t>(context.world_size());
  const size_t itemsize = request.itemsize();
  const bool is_root = context.rank() == request.root;
  if (is_root) copy_own(request);
  if (context.fits_payload(all_bytes(context))) {
    if (is_root) co_return;
    request.output.copy_to_chunk(
        context.payload(request.root, all_bytes(context)) + me * request.nbytes(), 0, 0,
        request.numel, itemsize);
    context.count_read(request.nbytes());
    co_return;
  }
  const RootedCopy direct(context);
  if (direct.is_possible()) {
    co_await direct.run(context);
    co_return;
  }
  const ChunkBlocks blocks(context, request.numel);
  const size_t slot_bytes = n * blocks.stride;
  const uint64_t first_round = group.rounds_posted() + 1;
  std::byte* const staging = is_root ? group.lease_staging(kSlots * slot_bytes) : nullptr;
  for (size_t block = 0; block < blocks.num_blocks; ++block) {
    const Range strip = blocks.strip(block, request.numel);
    const size_t in_staging = block % kSlots * slot_bytes;
    if (is_root) {
      for (size_t r = 0; r < n; ++r) {
        if (r == me) continue;
        // The slot last held block - kSlots.
        if (block >= kSlots) {
          co_await context.reached(group.round(static_cast<int>(r), first_round + block - kSlots));
        }
        request.input.copy_from_chunk(staging + in_staging + r * blocks.stride, r, strip.begin,
                                      strip.numel, itemsize);
        context.count_written(strip.numel * itemsize);
      }
      group.post_round(Wake::kEveryone);
    } else {
      co_await context.reached(group.round(request.root, first_round + block));
      const std::byte* slot = group.staging(request.root, kSlots * slot_bytes) + in_staging;
      request.output.copy_to_chunk(slot + me * blocks.stride, 0, strip.begin, strip.numel,
                                   itemsize);
      context.count_read(strip.numel * itemsize);
      group.post_round(Wake::kRoot, request.root);
    }
  }
  group.end_staging();
}

}  // namespace

const Algorithm kScatterDirect{"direct", Collective::kScatter, publish, run};

}  // namespace pycoll
