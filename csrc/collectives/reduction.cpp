#include "collectives/reduction.h"

#include <cstring>
#include <vector>

namespace pycoll {

cpu::ReduceArgs reduce_args(const Request& request, int world_size) {
  cpu::ReduceArgs args;
  args.dtype = request.dtype;
  args.op = request.op;
  args.divisor = request.op == ReduceOp::kAvg ? world_size : 0;
  return args;
}

void reduce_in_rank_order(const Context& context, const ReductionRange& range,
                          const std::byte* const* sources, std::byte* flat_result) {
  const Request& request = context.request;
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
