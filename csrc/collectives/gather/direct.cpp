// gather, direct: every rank shows its tensor, the root copies all. Beside the handshake's signal where it fits, else in blocks through
// staging. A rank's round of block j says, at the root: it has been read; elsewhere: it is there.
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
  // The root's own tensor stays where it is.
  return context.rank() == context.request.root || publish_input(context);
}

void copy_own(const Request& request) {
  const size_t itemsize = request.itemsize();
  request.input.for_each_run(0, 0, request.numel, itemsize,
                             [&](std::byte* data, size_t offset, size_t numel) {
                               request.output.copy_to_chunk(data, static_cast<size_t>(request.root),
                                                            offset, numel, itemsize);
                             });
}

Task run(Context context) {
  const Request& request = context.request;
  Group& group = context.group;
  const size_t itemsize = request.itemsize();
  const bool is_root = context.rank() == request.root;
  if (is_root) copy_own(request);
  if (context.fits_payload(request.nbytes())) {
    for (int r = 0; is_root && r < context.world_size(); ++r) {
      if (r == context.rank()) continue;
      request.output.copy_to_chunk(context.payload(r, request.nbytes()), static_cast<size_t>(r), 0,
                                   request.numel, itemsize);
      context.count_read(request.nbytes());
    }
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
  std::byte* const staging = is_root ? nullptr : group.lease_staging(kSlots * slot_bytes);
  for (size_t block = 0; block < num_blocks; ++block) {
    const size_t begin = block * block_numel;
    const size_t numel = std::min(block_numel, request.numel - begin);
    const size_t in_staging = block % kSlots * slot_bytes;
    if (is_root) {
      for (int r = 0; r < context.world_size(); ++r) {
        if (r == context.rank()) continue;
        co_await context.reached(group.round(r, first_round + block));
        const std::byte* slot = group.staging(r, kSlots * slot_bytes) + in_staging;
        request.output.copy_to_chunk(slot, static_cast<size_t>(r), begin, numel, itemsize);
        context.count_read(numel * itemsize);
      }
      group.post_round(Wake::kEveryone);
    } else {
      // The slot last held block - kSlots.
      if (block >= kSlots) {
        co_await context.reached(group.round(request.root, first_round + block - kSlots));
      }
      request.input.copy_from_chunk(staging + in_staging, 0, begin, numel, itemsize);
      context.count_written(numel * itemsize);
      group.post_round(Wake::kRoot, request.root);
    }
  }
  group.end_staging();
}

}  // namespace

const Algorithm kGatherDirect{"direct", Collective::kGather, publish, run};

}  // namespace pycoll
