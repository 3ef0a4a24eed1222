// all_gather, ring: each tensor goes around the ring once; each rank sends n - 1 tensors in n - 1 steps (topology/ring.h).
// Nothing is added up, so the result is the same as that of the direct algorithm.
#include "collectives/ring_pipeline.h"

namespace pycoll {
namespace {

bool publish(const Context&) { return false; }

Task run(Context context) {
  const Request& request = context.request;
  const int n = context.world_size();
  const size_t itemsize = request.itemsize();
  const size_t segment_numel =
      context.group.lane_to(ring::next(context.rank(), n)).slot_bytes() / itemsize;
  const auto chunk_at = [&](int step) {
    return static_cast<size_t>(ring::all_gather_chunk(context.rank(), step, n));
  };
  const auto chunk_numel = [&](size_t chunk) { return request.output.numel(chunk); };
  const auto handle = [&](const RingItem& item) -> size_t {
    const auto [begin, numel] = item.range;
    const std::byte* source = item.received;
    if (source == nullptr) {
      request.input.copy_from_chunk(item.to_send, 0, begin, numel, itemsize);
      source = item.to_send;
    } else {
      context.count_read(numel * itemsize);
      if (item.to_send != nullptr) std::memcpy(item.to_send, source, numel * itemsize);
    }
    request.output.copy_to_chunk(source, item.chunk, begin, numel, itemsize);
    return item.to_send == nullptr ? 0 : numel * itemsize;
  };
  co_await ring_pipeline(context, n, segment_numel, request.output.most_numel(), chunk_at,
                         chunk_numel, handle);
}

}  // namespace

const Algorithm kAllGatherRing{"ring", Collective::kAllGather, publish, run};

}  // namespace pycoll
