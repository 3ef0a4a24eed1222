#include "collectives/wire.h"

#include "base/error.h"

namespace pycoll {

void check_wire(const Request& request) {
  const cpu::WireFormat& wire = *request.wire;
  PYCOLL_CHECK_ARG(request.collective == Collective::kAllReduce ||
                       request.collective == Collective::kAllGather ||
                       request.collective == Collective::kReduceScatter,
                   "wire_dtype is ", name(wire.dtype), ", but ", name(request.collective),
                   " sends elements as they are; leave it out");
  PYCOLL_CHECK_ARG(
      cpu::is_wire_dtype(wire.dtype), "wire_dtype is ", name(wire.dtype),
      ", but elements travel as float8_e4m3fn, float8_e5m2, int8, bfloat16 or float16; "
      "choose one of these");
  PYCOLL_CHECK_ARG(cpu::is_encodable(request.dtype), "wire_dtype is ", name(wire.dtype),
                   ", and the tensor ", name(request.dtype),
                   ", but only float32, bfloat16 and float16 are encoded; convert the tensor, or "
                   "leave wire_dtype out");
  const bool has_scales = cpu::is_code_dtype(wire.dtype);
  PYCOLL_CHECK_ARG(has_scales ? wire.block >= 1 && wire.block <= cpu::kTileNumel : wire.block == 0,
                   "block is ", wire.block, " with wire_dtype ", name(wire.dtype), "; give 1 to ",
                   cpu::kTileNumel, " elements a scale for 8-bit types, 0 for 16-bit ones");
}

Range part_of_run(const Request& request, size_t numel, size_t parts, size_t index) {
  const size_t unit = request.wire ? request.wire->unit() : 1;
  const Range units = part(ceil_div(numel, unit), parts, index);
  const size_t begin = std::min(numel, units.begin * unit);
  return {begin, std::min(numel, (units.begin + units.numel) * unit) - begin};
}

void write_run(const Request& request, size_t chunk, Range range, std::byte* run) {
  if (!request.wire) {
    request.input.copy_from_chunk(run, chunk, range.begin, range.numel, request.itemsize());
    return;
  }
  for_each_tile(*request.wire, range.numel, [&](size_t begin, size_t numel) {
    float buffer[cpu::kTileNumel];
    const float* tile = buffer;
    request.input.for_each_run(chunk, range.begin + begin, numel, request.itemsize(),
                               [&](std::byte* data, size_t offset, size_t n) {
                                 if (request.dtype == DType::kFloat32 && n == numel) {
                                   tile = reinterpret_cast<const float*>(data);
                                 } else {
                                   cpu::widen(buffer + offset, request.dtype, data, n);
                                 }
                               });
    cpu::encode(*request.wire, tile, begin, numel, run, range.numel);
  });
}

void read_run(const Request& request, size_t chunk, Range range, const std::byte* run) {
  if (!request.wire) {
    request.output.copy_to_chunk(run, chunk, range.begin, range.numel, request.itemsize());
    return;
  }
  for_each_tile(*request.wire, range.numel, [&](size_t begin, size_t numel) {
    float tile[cpu::kTileNumel];
    cpu::decode(*request.wire, run, range.numel, begin, numel, tile);
    write_output(request, chunk, range.begin + begin, numel, tile);
  });
}

void write_output(const Request& request, size_t chunk, size_t begin, size_t numel,
                  const float* tile) {
  request.output.for_each_run(chunk, begin, numel, request.itemsize(),
                              [&](std::byte* data, size_t offset, size_t n) {
                                cpu::narrow(data, request.dtype, tile + offset, n);
                              });
}

}  // namespace pycoll
