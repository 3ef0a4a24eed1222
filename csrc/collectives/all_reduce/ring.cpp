// all_reduce, ring: a reduce-scatter around the ring, then an all-gather around it (topology/ring.h).
//
// Chunk c starts at rank c + 1 and collects one contribution a step, in the accumulate type, until it is complete at rank c; from
// there the result, rounded to the storage type, goes around once more. Each rank sends 2 (n - 1) / n of the tensor in
// 2 (n - 1) steps. The bracketing differs from chunk to chunk, so a result depends on where in the tensor an element lies: this
// algorithm breaks the fixed bracketing and is taken only when asked for.
#include "collectives/reduction.h"
#include "collectives/ring_pipeline.h"

namespace pycoll {
namespace {

bool publish(const Context&) { return false; }

// Adds this rank's contribution to what has been received; the last one finishes the reduction.
void add_own(const Context& context, const RingItem& item, size_t begin, bool last) {
  const Request& request = context.request;
  const size_t itemsize = request.itemsize();
  const size_t wide = pycoll::itemsize(accumulate_dtype(request.dtype, request.op));
  cpu::ReduceArgs args = reduce_args(request, context.world_size());
  cpu::Operand operands[2];
  operands[0].accumulated = true;
  operands[1].factor = request.factor;
  const bool first = item.received == nullptr;
  args.operands = first ? operands + 1 : operands;
  args.num_operands = first ? 1 : 2;
  args.dst_accumulated = !last;
  if (!last) args.divisor = 0;
  for_each_common_run(request, {0, begin, item.range.numel, begin},
                      [&](std::byte* input, std::byte* output, size_t offset, size_t numel) {
                        if (!first) operands[0].data = item.received + offset * wide;
                        operands[1].data = input;
                        args.dst = last ? output : item.to_send + offset * wide;
                        args.numel = numel;
                        cpu::reduce(args);
                        if (last)
                          std::memcpy(item.to_send + offset * itemsize, output, numel * itemsize);
                      });
}

Task run(Context context) {
  const Request& request = context.request;
  const int n = context.world_size();
  const size_t itemsize = request.itemsize();
  const size_t wide = pycoll::itemsize(accumulate_dtype(request.dtype, request.op));
  const size_t segment_numel =
      context.group.lane_to(ring::next(context.rank(), n)).slot_bytes() / wide;
  const auto chunk_at = [&](int step) {
    return static_cast<size_t>(ring::all_reduce_chunk(context.rank(), step, n));
  };
  const auto chunk_numel = [&](size_t chunk) {
    return part(request.numel, static_cast<size_t>(n), chunk).numel;
  };
  const auto handle = [&](const RingItem& item) -> size_t {
    const size_t begin =
        part(request.numel, static_cast<size_t>(n), item.chunk).begin + item.range.begin;
    const size_t numel = item.range.numel;
    context.count_read(item.received == nullptr ? 0
                                                : numel * (item.step <= n - 1 ? wide : itemsize));
    if (item.step < n - 1) {
      add_own(context, item, begin, false);
      return numel * wide;
    }
    if (item.step == n - 1) {
      add_own(context, item, begin, true);
      return numel * itemsize;
    }
    request.output.copy_to_chunk(item.received, 0, begin, numel, itemsize);
    if (item.to_send == nullptr) return 0;
    std::memcpy(item.to_send, item.received, numel * itemsize);
    return numel * itemsize;
  };
  co_await ring_pipeline(context, 2 * n - 1, segment_numel, chunk_numel(0), chunk_at, chunk_numel,
                         handle);
}

}  // namespace

const Algorithm kAllReduceRing{"ring", Collective::kAllReduce, publish, run};

}  // namespace pycoll
