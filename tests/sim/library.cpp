// A C interface to simulated collective kernels, so that Python tests can give them torch's tensors and compare with pycoll.reference.
// operators.cpp has the kernels that know no ranks.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "kernels/cuda/launch.h"
#include "sim_group.h"

namespace pycoll::sim {
namespace {

struct Message {
  char* text;
  size_t nbytes;

  int fail(const std::string& what) const {
    std::snprintf(text, nbytes, "%s", what.c_str());
    return 1;
  }
};

}  // namespace

// What all functions take. Mirrored by tests/simulated_kernels.py.
struct Call {
  int dtype, op, world_size;
  int wire_dtype;     // of codes
  size_t wire_block;  // 0: elements as they are
  size_t numel;       // of all_reduce; elsewhere of a chunk
  void** inputs;
  void** outputs;
  const double* factors;  // of PREMUL_SUM, one a rank
  uint64_t seed;
};

namespace {

// Launches a kernel on every rank. `launch(args, group, rank)` sets what is the kernel's own.
template <class Args, class Launch>
int run(const Call& call, SimGroup& group, size_t in_chunks, size_t out_chunks,
        const Message& message, Launch launch) {
  try {
    const size_t chunk_bytes = call.numel * itemsize(static_cast<DType>(call.dtype));
    for (int rank = 0; rank < call.world_size; ++rank) {
      group.simulation.buffers().add(call.inputs[rank], in_chunks * chunk_bytes);
      group.simulation.buffers().add(call.outputs[rank], out_chunks * chunk_bytes);
      Args args;
      args.group = group.group(rank, requires { args.mailboxes; });
      args.input = call.inputs[rank];
      args.output = call.outputs[rank];
      if constexpr (requires { args.numel; }) args.numel = call.numel;
      if constexpr (requires { args.dtype; }) args.dtype = static_cast<DType>(call.dtype);
      if constexpr (requires { args.reduction; })
        args.reduction = {static_cast<DType>(call.dtype), static_cast<ReduceOp>(call.op),
                          call.world_size, call.factors[rank]};
      if constexpr (requires { args.wire; })
        args.wire = {static_cast<DType>(call.wire_dtype), call.wire_block};
      if constexpr (requires { args.mailboxes; }) {
        args.mailboxes = group.mailboxes();
        args.capacity_units = group.sizes.capacity_units;
      } else if constexpr (requires { args.protocol; }) {
        args.protocol = group.sizes.protocol;
        args.staging = group.ring(rank);
      } else {
        args.staging = group.direct();
      }
      if constexpr (requires { args.chunks; }) {
        for (int i = 0; i < call.world_size; ++i) {
          args.chunks.begin[i] = static_cast<size_t>(i) * call.numel;
          args.chunks.numel[i] = call.numel;
        }
      }
      launch(args, group.config(), group.simulation.stream(rank));
    }
    const Report report = group.simulation.run();
    return report.done() ? 0 : message.fail(report.text);
  } catch (const std::exception& error) {
    return message.fail(error.what());
  }
}

SimGroup make_group(const Call& call, cuda::Protocol protocol) {
  const auto dtype = static_cast<DType>(call.dtype);
  const cuda::WireFormat wire{static_cast<DType>(call.wire_dtype), call.wire_block};
  return SimGroup({.world_size = call.world_size,
                   .slot_units = 70,
                   .capacity_units = round_up(cuda::packet_units(call.numel, dtype, wire) + 1, 8),
                   .protocol = protocol},
                  {.seed = call.seed});
}

}  // namespace
}  // namespace pycoll::sim

using pycoll::sim::Call;
using pycoll::sim::make_group;
using pycoll::sim::Message;
using pycoll::sim::run;
namespace cuda = pycoll::cuda;

// Every function returns 0, or 1 and a text.
extern "C" {

// `algorithm`: 0 one-shot, 1 two-shot, 2 ring, 3 ring by LL128.
int pycoll_sim_all_reduce(const Call* call, int algorithm, char* text, size_t text_bytes) {
  auto group = make_group(*call, algorithm == 3 ? cuda::Protocol::kLL128 : cuda::Protocol::kSimple);
  const Message message{text, text_bytes};
  if (algorithm == 0)
    return run<cuda::AllReduceOneShotArgs>(*call, group, 1, 1, message,
                                           cuda::launch_all_reduce_one_shot);
  if (algorithm == 1)
    return run<cuda::AllReduceTwoShotArgs>(*call, group, 1, 1, message,
                                           cuda::launch_all_reduce_two_shot);
  return run<cuda::AllReduceRingArgs>(*call, group, 1, 1, message, cuda::launch_all_reduce_ring);
}

// Direct.
int pycoll_sim_reduce_scatter(const Call* call, char* text, size_t text_bytes) {
  auto group = make_group(*call, cuda::Protocol::kSimple);
  return run<cuda::ReduceScatterDirectArgs>(*call, group, static_cast<size_t>(call->world_size), 1,
                                            {text, text_bytes}, cuda::launch_reduce_scatter_direct);
}

// Direct, on a quantised wire.
int pycoll_sim_all_gather(const Call* call, char* text, size_t text_bytes) {
  auto group = make_group(*call, cuda::Protocol::kSimple);
  return run<cuda::AllGatherQuantisedArgs>(*call, group, 1, static_cast<size_t>(call->world_size),
                                           {text, text_bytes}, cuda::launch_all_gather_quantised);
}

}  // extern "C"
