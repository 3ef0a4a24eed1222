// A C interface to simulated kernels, so that Python tests can give them torch's tensors and compare with torch's arithmetic.
//
// Every function returns 0, or 1 and a text in `message`.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "kernels/cuda/bucket.h"
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

template <class Fn>
int run(const Message& message, SimGroup& group, Fn launch_all) {
  try {
    launch_all();
    const Report report = group.simulation.run();
    return report.done() ? 0 : message.fail(report.text);
  } catch (const std::exception& error) {
    return message.fail(error.what());
  }
}

template <class Args>
void set_common(Args& args, SimGroup& group, int rank, const void* input, void* output,
                size_t numel, bool one_shot = false) {
  args.group = group.group(rank, one_shot);
  args.input = input;
  args.output = output;
  args.numel = numel;
}

}  // namespace
}  // namespace pycoll::sim

using pycoll::DType;
using pycoll::ReduceOp;
using pycoll::sim::Message;
using pycoll::sim::set_common;
using pycoll::sim::SimGroup;
namespace cuda = pycoll::cuda;

extern "C" {

// `algorithm`: 0 one-shot, 1 two-shot, 2 ring, 3 ring by LL128. `factors`: of PREMUL_SUM, one a rank.
int pycoll_sim_all_reduce(int algorithm, int dtype, int op, int world_size, size_t numel,
                          void** inputs, void** outputs, const double* factors, uint64_t seed,
                          char* text, size_t text_bytes) {
  const bool ll128 = algorithm == 3;
  SimGroup group({.world_size = world_size,
                  .slot_units = 16,
                  .capacity_units = pycoll::round_up(numel + 1, 8),
                  .protocol = ll128 ? cuda::Protocol::kLL128 : cuda::Protocol::kSimple},
                 {.seed = seed});
  return run(Message{text, text_bytes}, group, [&] {
    for (int rank = 0; rank < world_size; ++rank) {
      void* const stream = group.simulation.stream(rank);
      const size_t nbytes = numel * pycoll::itemsize(static_cast<DType>(dtype));
      group.simulation.buffers().add(inputs[rank], nbytes);
      group.simulation.buffers().add(outputs[rank], nbytes);
      const cuda::Reduction reduction{static_cast<DType>(dtype), static_cast<ReduceOp>(op),
                                      world_size, factors[rank]};
      if (algorithm == 0) {
        cuda::AllReduceOneShotArgs args;
        set_common(args, group, rank, inputs[rank], outputs[rank], numel, true);
        args.reduction = reduction;
        args.mailboxes = group.mailboxes();
        args.capacity_units = group.sizes.capacity_units;
        cuda::launch_all_reduce_one_shot(args, group.config(), stream);
      } else if (algorithm == 1) {
        cuda::AllReduceTwoShotArgs args;
        set_common(args, group, rank, inputs[rank], outputs[rank], numel);
        args.reduction = reduction;
        args.staging = group.direct();
        cuda::launch_all_reduce_two_shot(args, group.config(), stream);
      } else {
        cuda::AllReduceRingArgs args;
        set_common(args, group, rank, inputs[rank], outputs[rank], numel);
        args.reduction = reduction;
        args.protocol = group.sizes.protocol;
        args.staging = group.ring(rank);
        cuda::launch_all_reduce_ring(args, group.config(), stream);
      }
    }
  });
}

int pycoll_sim_all_reduce_quantised(int dtype, int wire_dtype, size_t block_numel, int divisor,
                                    int world_size, size_t numel, void** inputs, void** outputs,
                                    uint64_t seed, char* text, size_t text_bytes) {
  SimGroup group({.world_size = world_size, .slot_units = 70}, {.seed = seed});
  return run(Message{text, text_bytes}, group, [&] {
    for (int rank = 0; rank < world_size; ++rank) {
      const size_t nbytes = numel * pycoll::itemsize(static_cast<DType>(dtype));
      group.simulation.buffers().add(inputs[rank], nbytes);
      group.simulation.buffers().add(outputs[rank], nbytes);
      cuda::AllReduceQuantisedArgs args;
      set_common(args, group, rank, inputs[rank], outputs[rank], numel);
      args.dtype = static_cast<DType>(dtype);
      args.wire_dtype = static_cast<DType>(wire_dtype);
      args.block_numel = block_numel;
      args.divisor = divisor;
      args.staging = group.direct();
      cuda::launch_all_reduce_quantised(args, group.config(), group.simulation.stream(rank));
    }
  });
}

// `tensors`: BucketTensor's three words for each; addresses are the host's.
int pycoll_sim_flatten(int unflatten, int tensor_dtype, int bucket_dtype, const uint64_t* tensors,
                       size_t num_tensors, void* bucket, size_t bucket_numel, float scale,
                       int accumulate, float* amax, char* text, size_t text_bytes) {
  SimGroup group({.world_size = 1}, {});
  return run(Message{text, text_bytes}, group, [&] {
    cuda::BucketArgs args;
    args.tensors = reinterpret_cast<const cuda::BucketTensor*>(tensors);
    args.num_tensors = num_tensors;
    args.bucket = bucket;
    args.bucket_numel = bucket_numel;
    args.tensor_dtype = static_cast<DType>(tensor_dtype);
    args.bucket_dtype = static_cast<DType>(bucket_dtype);
    args.scale = scale;
    args.accumulate = accumulate != 0;
    args.amax = reinterpret_cast<uint32_t*>(amax);
    auto& buffers = group.simulation.buffers();
    buffers.add(tensors, num_tensors * sizeof(cuda::BucketTensor));
    buffers.add(bucket, bucket_numel * pycoll::itemsize(args.bucket_dtype));
    buffers.add(amax, sizeof(float));
    for (size_t i = 0; i < num_tensors; ++i)
      buffers.add(reinterpret_cast<const void*>(tensors[3 * i]),
                  tensors[3 * i + 1] * pycoll::itemsize(args.tensor_dtype));
    const auto launch = unflatten != 0 ? cuda::launch_unflatten : cuda::launch_flatten;
    launch(args, {2, 64}, group.simulation.stream(0));
  });
}

int pycoll_sim_quantise(int dequantise, int data_dtype, int code_dtype, void* data, void* codes,
                        float* scales, size_t numel, size_t block_numel, char* text,
                        size_t text_bytes) {
  SimGroup group({.world_size = 1}, {});
  return run(Message{text, text_bytes}, group, [&] {
    const cuda::QuantiseArgs args{data,
                                  codes,
                                  scales,
                                  numel,
                                  block_numel,
                                  static_cast<DType>(data_dtype),
                                  static_cast<DType>(code_dtype)};
    auto& buffers = group.simulation.buffers();
    buffers.add(data, numel * pycoll::itemsize(args.data_dtype));
    buffers.add(codes, numel);
    buffers.add(scales, pycoll::ceil_div(numel, block_numel) * sizeof(float));
    const auto launch = dequantise != 0 ? cuda::launch_dequantise : cuda::launch_quantise;
    launch(args, {2, 64}, group.simulation.stream(0));
  });
}

}  // extern "C"
