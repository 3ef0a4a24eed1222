// Collectives whose elements travel in another dtype than they are stored in.
#include <ATen/ops/empty.h>

#include "base/error.h"
#include "torch/process_group.h"
#include "torch/requests.h"

namespace pycoll::torch_adapter {
namespace {

using WireCall = ProcessGroupPycoll::WireCall;

// Empty where nothing has to be encoded.
std::optional<cpu::WireFormat> wire_format(const WireCall& call, DType storage) {
  const at::Tensor example = at::empty({0}, at::TensorOptions(call.wire_dtype));
  PYCOLL_CHECK_ARG(
      !travels_as_bytes(example), "wire_dtype is ", dtype_name(example),
      ", but elements travel as float8_e4m3fn, float8_e5m2, int8, bfloat16 or float16; "
      "choose one of these");
  const DType dtype = elements_of(example).dtype;
  if (dtype == storage) return std::nullopt;
  if (!cpu::is_code_dtype(dtype)) return cpu::WireFormat{dtype, 0};
  PYCOLL_CHECK_ARG(call.block > 0, "block is ", call.block,
                   "; give a positive number of elements a scale");
  return cpu::WireFormat{dtype, static_cast<size_t>(call.block)};
}

Request make_request(const WireCall& call, TensorSet* set, std::vector<at::Tensor> outputs,
                     std::vector<at::Tensor> inputs, int rank, int world_size) {
  if (call.collective == name(Collective::kAllReduce)) {
    return all_reduce_request(set, only(outputs, "tensors"), call.op);
  }
  if (call.collective == name(Collective::kAllGather)) {
    return call.lists
               ? all_gather_request(set, outputs, only(inputs, "the input"), rank, world_size)
               : all_gather_base_request(set, outputs, inputs, rank, world_size);
  }
  return call.lists ? reduce_scatter_request(set, only(outputs, "the output"), inputs, call.op,
                                             rank, world_size)
                    : reduce_scatter_base_request(set, outputs, inputs, call.op, rank, world_size);
}

}  // namespace

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::on_wire(const WireCall& call,
                                                        const Tensors& outputs,
                                                        const Tensors& inputs) {
  const Tensors& example = inputs.empty() ? outputs : inputs;
  Call about{c10d::OpType::ALLREDUCE,
             Collective::kAllReduce,
             c10d::kUnsetTimeout,
             call.async,
             example.empty() ? c10::Device(c10::kCPU) : example[0].device(),
             inputs};
  if (call.collective == name(Collective::kAllGather)) {
    about.type = c10d::OpType::ALLGATHER;
    about.collective = Collective::kAllGather;
  } else if (call.collective == name(Collective::kReduceScatter)) {
    about.type = c10d::OpType::REDUCE_SCATTER;
    about.collective = Collective::kReduceScatter;
  }
  const BuildRequests build = [&](TensorSet* set) {
    Request request = make_request(call, set, outputs, inputs, getRank(), getSize());
    request.wire = wire_format(call, request.dtype);
    return std::vector<Request>{std::move(request)};
  };
  return launch(about, outputs, build);
}

}  // namespace pycoll::torch_adapter
