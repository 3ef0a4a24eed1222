// reduce_scatter, ring: the first half of the ring all_reduce. Chunk c starts at rank c + 1, collects one contribution a step in the
// accumulate type and ends at rank c, where it is rounded once. Each rank sends n - 1 chunks in n - 1 steps. The order of
// additions differs from chunk to chunk: taken only when asked for.
#include "collectives/reduction.h"
#include "collectives/ring_pipeline.h"

namespace pycoll {
namespace {

bool publish(const Context&) { return false; }

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
  const auto chunk_numel = [&](size_t chunk) { return request.input.numel(chunk); };
  const auto handle = [&](const RingItem& item) -> size_t {
    const auto [begin, numel] = item.range;
    const bool last = item.to_send == nullptr;
    cpu::ReduceArgs args = reduce_args(request, n);
    cpu::Operand operands[2];
    operands[0].accumulated = true;
    operands[1].factor = request.factor;
    args.operands = item.received == nullptr ? operands + 1 : operands;
    args.num_operands = item.received == nullptr ? 1 : 2;
    args.dst_accumulated = !last;
    if (!last) args.divisor = 0;
    const auto reduce = [&](std::byte* input, std::byte* output, size_t offset, size_t n_run) {
      operands[0].data = item.received == nullptr ? nullptr : item.received + offset * wide;
      operands[1].data = input;
      args.dst = last ? output : item.to_send + offset * wide;
      args.numel = n_run;
      cpu::reduce(args);
    };
    if (last) {
      for_each_common_run(request, {item.chunk, begin, numel, begin}, reduce);
    } else {
      request.input.for_each_run(item.chunk, begin, numel, itemsize,
                                 [&](std::byte* input, size_t offset, size_t n_run) {
                                   reduce(input, nullptr, offset, n_run);
                                 });
    }
    if (item.received != nullptr) context.count_read(numel * wide);
    return last ? 0 : numel * wide;
  };
  co_await ring_pipeline(context, n, segment_numel, request.input.most_numel(), chunk_at,
                         chunk_numel, handle);
}

}  // namespace

const Algorithm kReduceScatterRing{"ring", Collective::kReduceScatter, publish, run};

}  // namespace pycoll
