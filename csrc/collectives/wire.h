// Runs of elements on their way through shared memory. Algorithms write and read them here, so that what travels (elements as they
// are stored, or encoded: Request::wire) is a parameter and no path of its own.
#pragma once

#include "collectives/request.h"
#include "topology/partition.h"

namespace pycoll {

// Elements that one run of about `nbytes` on the wire takes: whole units, one at least.
inline size_t run_numel(const Request& request, size_t nbytes) {
  if (!request.wire) return std::max<size_t>(1, nbytes / request.itemsize());
  const size_t unit = request.wire->unit();
  return std::max<size_t>(1, nbytes / itemsize(request.wire->dtype) / unit) * unit;
}

// Raises kInvalidArgument unless the request can travel as its wire format says.
void check_wire(const Request& request);

// Part `index` of a run of `numel` elements, cut into `parts` at multiples of the unit.
Range part_of_run(const Request& request, size_t numel, size_t parts, size_t index);

// From this rank's input: elements `range` of a chunk. On the wire, runs begin at multiples of the unit of their chunk.
void write_run(const Request& request, size_t chunk, Range range, std::byte* run);
// To this rank's output.
void read_run(const Request& request, size_t chunk, Range range, const std::byte* run);

// fn(tile begin, numel) for the parts of an encoded run that are worked on at once.
template <class Fn>
void for_each_tile(const cpu::WireFormat& format, size_t numel, const Fn& fn) {
  const size_t tile_numel = cpu::wire_tile_numel(format);
  for (size_t begin = 0; begin < numel; begin += tile_numel)
    fn(begin, std::min(tile_numel, numel - begin));
}

// float32 elements to this rank's output, from element `begin` of a chunk on.
void write_output(const Request& request, size_t chunk, size_t begin, size_t numel,
                  const float* tile);

}  // namespace pycoll
