// The part that all ring algorithms share: segments that travel around the ring, many under way at once.
//
// A chunk is cut into segments. Segment k of a chunk passes a rank once in each of `num_steps` steps: in step 0 the rank sends
// something of its own, in the steps between it receives, works and sends on, in the last it only receives. At time t a rank
// handles step s of segment t - s, for every s: what it receives was sent at time t - 1, so nobody waits for the step
// just before.
//
// No deadlock: all ranks handle (segment, step) in the same order, and a lane holds num_steps + 1 segments: the num_steps - 1 that
// were sent at the time before, that of step 0, and that of step 1, which is sent while the one received is still held. So
// the rank that is furthest behind can always go on; with a slot less all may wait for each other (tests/spin/ring_pipeline.pml).
#pragma once

#include "collectives/algorithm.h"
#include "topology/ring.h"

namespace pycoll {

struct RingItem {
  size_t chunk;
  Range range;  // of elements in the chunk; never empty
  int step;
  const std::byte* received;  // null in the first step
  std::byte* to_send;         // null in the last step
};

// chunk_at(step): the chunk that this rank handles in a step. handle(item): fills item.to_send and returns the bytes to send.
// chunk_numel(chunk): its elements; all ranks agree.
template <class ChunkAt, class ChunkNumel, class Handle>
Task ring_pipeline(Context context, int num_steps, size_t segment_numel, size_t most_chunk_numel,
                   ChunkAt chunk_at, ChunkNumel chunk_numel, Handle handle) {
  Group& group = context.group;
  context.event.memory_path = "staged";
  const int next = ring::next(context.rank(), context.world_size());
  const int previous = ring::previous(context.rank(), context.world_size());
  SendLane& out = group.lane_to(next);
  co_await context.reached(group.lane_offered(previous));
  ReceiveLane& in = group.lane_from(previous);
  const size_t num_segments = ceil_div(most_chunk_numel, segment_numel);
  const size_t steps = static_cast<size_t>(num_steps);
  for (size_t time = 0; time + 1 < num_segments + steps; ++time) {
    for (size_t step = 0; step < steps && step <= time; ++step) {
      const size_t segment = time - step;
      if (segment >= num_segments) continue;
      RingItem item{chunk_at(static_cast<int>(step)), {}, static_cast<int>(step), nullptr, nullptr};
      const size_t numel = chunk_numel(item.chunk);
      item.range.begin = segment * segment_numel;
      if (item.range.begin >= numel)
        continue;  // chunks differ by one element: this one has a segment less
      item.range.numel = std::min(segment_numel, numel - item.range.begin);
      if (step > 0) {
        co_await context.reached(in.readable());
        item.received = in.slot();
      }
      if (step + 1 < steps) {
        co_await context.reached(out.writable());
        item.to_send = out.slot();
      }
      context.count_written(handle(item));
      if (item.to_send != nullptr) out.commit();
      if (item.received != nullptr) in.release();
    }
  }
}

}  // namespace pycoll
