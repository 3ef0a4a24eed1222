// broadcast, direct: the root shows its tensor, all others copy it. Beside the root's signal where it fits, else in blocks
// through the root's staging, or straight between the tensors where all are reachable. A rank's round of block j says, at the root: it is there; elsewhere: it has been read.
#include "collectives/one_shot.h"
#include "collectives/rooted_copy.h"

namespace pycoll {
namespace {

constexpr size_t kSlots = 4;

bool publish(const Context& context) {
  if (!context.fits_payload(context.request.nbytes())) {
    RootedCopy::announce(context);
    return false;
  }
  return context.rank() != context.request.root || publish_input(context);
}

Task run(Context context) {
  const Request& request = context.request;
  Group& group = context.group;
  const size_t itemsize = request.itemsize();
  const bool is_root = context.rank() == request.root;
  if (context.fits_payload(request.nbytes())) {
    if (is_root) co_return;
    request.output.copy_to_chunk(context.payload(request.root, request.nbytes()), 0, 0,
                                 request.numel, itemsize);
    context.count_read(request.nbytes());
    co_return;
  }
  const RootedCopy direct(context);
  if (direct.is_possible()) {
    co_await direct.run(context);
    co_return;
  }
  const size_t block_numel = group.facts().staging_bytes / itemsize;
  const size_t slot_bytes = block_numel * itemsize;
  const size_t num_blocks = ceil_div(request.numel, block_numel);
  const uint64_t first_round = group.rounds_posted() + 1;
  std::byte* const staging = is_root ? group.lease_staging(kSlots * slot_bytes) : nullptr;
  for (size_t block = 0; block < num_blocks; ++block) {
    const size_t begin = block * block_numel;
    const size_t numel = std::min(block_numel, request.numel - begin);
    const size_t in_staging = block % kSlots * slot_bytes;
    if (is_root) {
      // The slot last held block - kSlots.
      for (int r = 0; block >= kSlots && r < context.world_size(); ++r) {
        if (r != context.rank())
          co_await context.reached(group.round(r, first_round + block - kSlots));
      }
      request.input.copy_from_chunk(staging + in_staging, 0, begin, numel, itemsize);
      context.count_written(numel * itemsize);
      group.post_round(Wake::kEveryone);
    } else {
      co_await context.reached(group.round(request.root, first_round + block));
      const std::byte* slot = group.staging(request.root, kSlots * slot_bytes) + in_staging;
      request.output.copy_to_chunk(slot, 0, begin, numel, itemsize);
      context.count_read(numel * itemsize);
      group.post_round(Wake::kRoot, request.root);
    }
  }
  group.end_staging();
}

}  // namespace

const Algorithm kBroadcastDirect{"direct", Collective::kBroadcast, publish, run};

}  // namespace pycoll
