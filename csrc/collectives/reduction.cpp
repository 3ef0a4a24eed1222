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
  for_each_common_run(
      request, range, [&](std::byte* input, std::byte* output, size_t offset, size_t numel) {
        for (size_t r = 0; r < operands.size(); ++r) {
          operands[r].data = sources[r] != nullptr ? sources[r] + offset * itemsize : input;
        }
        args.dst = output;
        args.numel = numel;
        cpu::reduce(args);
        if (flat_result != nullptr) {
          std::memcpy(flat_result + offset * itemsize, output, numel * itemsize);
        }
      });
}

}  // namespace pycoll
