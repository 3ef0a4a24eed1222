#include "collectives/reduction.h"

#include <cstring>
#include <vector>

#include "collectives/wire.h"

namespace pycoll {

cpu::ReduceArgs reduce_args(const Request& request, int world_size) {
  cpu::ReduceArgs args;
  args.dtype = request.dtype;
  args.op = request.op;
  args.divisor = request.op == ReduceOp::kAvg ? world_size : 0;
  return args;
}

namespace {

// Contributions are decoded to float32 tile by tile, and added there. All ranks of an all_reduce must end with the same bits, also
// where an algorithm has every rank add by itself: so the result is encoded and decoded once more, whether it travels or not.
void reduce_encoded(const Context& context, const ReductionRange& range,
                    const std::byte* const* sources, std::byte* flat_result) {
  const Request& request = context.request;
  const cpu::WireFormat& wire = *request.wire;
  const auto world_size = static_cast<size_t>(context.world_size());
  std::vector<float> tiles(world_size * cpu::kTileNumel);
  std::vector<std::byte> once_more(wire.nbytes(cpu::kTileNumel));
  std::vector<cpu::Operand> operands(world_size);
  cpu::ReduceArgs args = reduce_args(request, context.world_size());
  args.dtype = DType::kFloat32;
  args.operands = operands.data();
  args.num_operands = context.world_size();
  args.dst = tiles.data();
  for_each_tile(wire, range.numel, [&](size_t begin, size_t numel) {
    for (size_t r = 0; r < world_size; ++r) {
      float* const tile = tiles.data() + r * cpu::kTileNumel;
      cpu::decode(wire, sources[r], range.numel, begin, numel, tile);
      operands[r].data = tile;
      operands[r].factor = context.factor(static_cast<int>(r));
    }
    args.numel = numel;
    cpu::reduce(args);
    if (flat_result != nullptr) {
      cpu::encode(wire, tiles.data(), begin, numel, flat_result, range.numel);
      cpu::decode(wire, flat_result, range.numel, begin, numel, tiles.data());
    } else if (request.collective == Collective::kAllReduce) {
      cpu::encode(wire, tiles.data(), 0, numel, once_more.data(), numel);
      cpu::decode(wire, once_more.data(), numel, 0, numel, tiles.data());
    }
    write_output(request, 0, range.output_begin + begin, numel, tiles.data());
  });
}

}  // namespace

void reduce_in_rank_order(const Context& context, const ReductionRange& range,
                          const std::byte* const* sources, std::byte* flat_result) {
  const Request& request = context.request;
  if (request.wire) return reduce_encoded(context, range, sources, flat_result);
  const size_t itemsize = request.itemsize();
  const int world_size = context.world_size();
  cpu::ReduceArgs args = reduce_args(request, world_size);
  std::vector<cpu::Operand> operands(static_cast<size_t>(world_size));
  for (int r = 0; r < world_size; ++r) operands[static_cast<size_t>(r)].factor = context.factor(r);
  args.operands = operands.data();
  args.num_operands = world_size;
  const auto reduce_run = [&](std::byte* input, std::byte* result, size_t offset, size_t numel) {
    for (size_t r = 0; r < operands.size(); ++r) {
      operands[r].data = sources[r] != nullptr ? sources[r] + offset * itemsize : input;
    }
    args.dst = result;
    args.numel = numel;
    cpu::reduce(args);
  };
  if (request.output.num_chunks() == 0) {
    request.input.for_each_run(range.input_chunk, range.begin, range.numel, itemsize,
                               [&](std::byte* input, size_t offset, size_t numel) {
                                 reduce_run(input, flat_result + offset * itemsize, offset, numel);
                               });
    return;
  }
  for_each_common_run(request, range,
                      [&](std::byte* input, std::byte* output, size_t offset, size_t numel) {
                        reduce_run(input, output, offset, numel);
                        if (flat_result != nullptr) {
                          std::memcpy(flat_result + offset * itemsize, output, numel * itemsize);
                        }
                      });
}

}  // namespace pycoll
