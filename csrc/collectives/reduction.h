// Reducing what ranks hold in different places, in rank order, into the user's output.
#pragma once

#include "collectives/algorithm.h"
#include "kernels/cpu/reduce.h"

namespace pycoll {

// A run of elements that is to be reduced, and where it goes.
struct ReductionRange {
  size_t input_chunk = 0;
  size_t begin = 0;  // in that chunk
  size_t numel = 0;
  size_t output_begin = 0;  // in output chunk 0
};

// sources[r] points at the first element of the range that rank r contributes, as a flat array; null: this rank's own input.
// The result goes to the user's output, where this rank has one, and to `flat_result`, where it is not null. With a wire format
// sources and `flat_result` are encoded runs, none null, and the result of an all_reduce is what the wire makes of it.
void reduce_in_rank_order(const Context& context, const ReductionRange& range,
                          const std::byte* const* sources, std::byte* flat_result);

// fn(input, output, offset, numel) for each run that is contiguous in both.
template <class Fn>
void for_each_common_run(const Request& request, const ReductionRange& range, const Fn& fn) {
  const size_t itemsize = request.itemsize();
  request.input.for_each_run(range.input_chunk, range.begin, range.numel, itemsize,
                             [&](std::byte* input, size_t done, size_t numel) {
                               request.output.for_each_run(
                                   0, range.output_begin + done, numel, itemsize,
                                   [&](std::byte* output, size_t offset, size_t n) {
                                     fn(input + offset * itemsize, output, done + offset, n);
                                   });
                             });
}

// The arguments of a reduction that do not depend on where the elements lie.
cpu::ReduceArgs reduce_args(const Request& request, int world_size);

}  // namespace pycoll
