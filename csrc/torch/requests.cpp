#include "torch/requests.h"

#include "base/error.h"

namespace pycoll::torch_adapter {
namespace {

// Mixes a number into a hash (FNV-1a over its bytes).
uint64_t mix(uint64_t hash, uint64_t number) {
  for (int i = 0; i < 8; ++i) {
    hash = (hash ^ ((number >> (8 * i)) & 0xff)) * 0x100000001b3;
  }
  return hash;
}

uint64_t layout_hash(const Tensors& tensors) {
  if (tensors.size() == 1) return 0;
  uint64_t hash = 0xcbf29ce484222325;
  for (const at::Tensor& tensor : tensors) hash = mix(hash, static_cast<uint64_t>(tensor.numel()));
  return hash | 1;
}

std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }

void check_nonempty(const Tensors& tensors, const char* argument) {
  PYCOLL_CHECK_ARG(!tensors.empty(), argument, " is an empty list; pass at least one tensor");
}

void check_count(const Tensors& tensors, const char* argument, int world_size) {
  PYCOLL_CHECK_ARG(static_cast<int>(tensors.size()) == world_size, argument, " has ",
                   tensors.size(), " tensors, but the group has ", world_size,
                   " ranks; pass one for each");
}

// `whole` must hold world_size times `part`.
void check_multiple(const at::Tensor& whole, const char* whole_name, const at::Tensor& part,
                    const char* part_name, int world_size) {
  check_same_dtype(whole, whole_name, part, part_name);
  PYCOLL_CHECK_ARG(whole.numel() == part.numel() * world_size, whole_name, " has ", whole.numel(),
                   " elements and ", part_name, " has ", part.numel(), ", but in a group of ",
                   world_size, " ranks ", whole_name, " must have ", world_size, " x ",
                   part.numel(), " = ", part.numel() * world_size, "; resize one of them");
}

void check_equal_numel(const at::Tensor& a, const std::string& a_name, const at::Tensor& b,
                       const char* b_name) {
  check_same_dtype(a, a_name.c_str(), b, b_name);
  PYCOLL_CHECK_ARG(a.numel() == b.numel(), a_name, " has ", a.numel(), " elements and ", b_name,
                   " has ", b.numel(), "; all must have equally many");
}

// The pieces of tensors that are each divided evenly among the ranks: chunk r holds part r of every one.
void add_chunks(ChunkView* view, TensorSet* set, const Tensors& tensors, Role role,
                int world_size) {
  std::vector<std::byte*> data;
  for (const at::Tensor& tensor : tensors) data.push_back(bytes(set->add(tensor, role)));
  for (int r = 0; r < world_size; ++r) {
    view->add_chunk();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Elements elements = elements_of(tensors[i]);
      const size_t numel = elements.numel / static_cast<size_t>(world_size);
      view->add_piece(data[i] + static_cast<size_t>(r) * numel * itemsize(elements.dtype), numel);
    }
  }
}

void add_whole(ChunkView* view, TensorSet* set, const Tensors& tensors, Role role) {
  view->add_chunk();
  for (const at::Tensor& tensor : tensors) {
    view->add_piece(set->add(tensor, role), elements_of(tensor).numel);
  }
}

size_t total_numel(const Tensors& tensors) {
  size_t numel = 0;
  for (const at::Tensor& tensor : tensors) numel += elements_of(tensor).numel;
  return numel;
}

Request make_request(Collective collective, const at::Tensor& example) {
  Request request;
  request.collective = collective;
  request.dtype = elements_of(example).dtype;
  return request;
}

// Reductions need to know the type; what only moves may travel as bytes.
void check_reducible(const at::Tensor& tensor, const char* argument) {
  PYCOLL_CHECK_ARG(!travels_as_bytes(tensor), argument, " has dtype ", dtype_name(tensor),
                   ", which pycoll moves but does not reduce; convert it first");
}

}  // namespace

at::Tensor& only(Tensors& tensors, const char* argument) {
  PYCOLL_CHECK_ARG(tensors.size() == 1, argument, " has ", tensors.size(), " tensors; pass one");
  return tensors[0];
}

void set_reduce_op(Request* request, const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      request->op = ReduceOp::kSum;
      return;
    case c10d::ReduceOp::AVG:
      request->op = ReduceOp::kAvg;
      return;
    case c10d::ReduceOp::PRODUCT:
      request->op = ReduceOp::kProduct;
      return;
    case c10d::ReduceOp::MIN:
      request->op = ReduceOp::kMin;
      return;
    case c10d::ReduceOp::MAX:
      request->op = ReduceOp::kMax;
      return;
    case c10d::ReduceOp::BAND:
      request->op = ReduceOp::kBand;
      return;
    case c10d::ReduceOp::BOR:
      request->op = ReduceOp::kBor;
      return;
    case c10d::ReduceOp::BXOR:
      request->op = ReduceOp::kBxor;
      return;
    case c10d::ReduceOp::PREMUL_SUM: {
      request->op = ReduceOp::kPremulSum;
      const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
      PYCOLL_CHECK_ARG(supplement != nullptr,
                       "op PREMUL_SUM comes without a factor; make it with "
                       "torch.distributed._make_nccl_premul_sum(factor)");
      request->factor = supplement->tensor_factor.defined()
                            ? supplement->tensor_factor.item<double>()
                            : supplement->double_factor;
      return;
    }
    default:
      fail(ErrorKind::kInvalidArgument, "op ", static_cast<int>(op.op_),
           " is none of SUM, AVG, PRODUCT, MIN, MAX, "
           "BAND, BOR, BXOR, PREMUL_SUM");
  }
}

Request all_reduce_request(TensorSet* set, at::Tensor& tensor, const c10d::ReduceOp& op) {
  return all_reduce_coalesced_request(set, {tensor}, op);
}

Request all_reduce_coalesced_request(TensorSet* set, const Tensors& tensors,
                                     const c10d::ReduceOp& op) {
  check_nonempty(tensors, "tensors");
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "tensor", Role::kInOut);
    check_reducible(tensor, "tensor");
    check_same_dtype(tensor, "tensor", tensors[0], "the first tensor");
  }
  check_disjoint(tensors, "tensors");
  Request request = make_request(Collective::kAllReduce, tensors[0]);
  set_reduce_op(&request, op);
  request.numel = total_numel(tensors);
  request.layout_hash = layout_hash(tensors);
  add_whole(&request.input, set, tensors, Role::kInOut);
  request.output = request.input;
  return request;
}

Request broadcast_request(TensorSet* set, at::Tensor& tensor, int root, bool is_root) {
  const Role role = is_root ? Role::kInput : Role::kOutput;
  check_tensor(tensor, "tensor", role);
  Request request = make_request(Collective::kBroadcast, tensor);
  request.root = root;
  request.numel = elements_of(tensor).numel;
  add_whole(is_root ? &request.input : &request.output, set, {tensor}, role);
  return request;
}

Request all_gather_request(TensorSet* set, const Tensors& outputs, const at::Tensor& input,
                           int world_size) {
  check_tensor(input, "the input tensor", Role::kInput);
  check_count(outputs, "tensor_list", world_size);
  for (size_t r = 0; r < outputs.size(); ++r) {
    check_tensor(outputs[r], "a tensor of tensor_list", Role::kOutput);
    check_equal_numel(outputs[r], concat("tensor_list[", r, "]"), input, "the input tensor");
  }
  check_disjoint(outputs, "tensor_list");
  Request request = make_request(Collective::kAllGather, input);
  request.numel = elements_of(input).numel;
  add_whole(&request.input, set, {input}, Role::kInput);
  for (const at::Tensor& output : outputs) {
    request.output.add_chunk(set->add(output, Role::kOutput), elements_of(output).numel);
  }
  return request;
}

Request all_gather_base_request(TensorSet* set, const Tensors& outputs, const Tensors& inputs,
                                int world_size) {
  check_nonempty(inputs, "the list of input tensors");
  PYCOLL_CHECK_ARG(outputs.size() == inputs.size(), "there are ", outputs.size(),
                   " output tensors and ", inputs.size(), " input tensors; pass equally many");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], "the input tensor", Role::kInput);
    check_tensor(outputs[i], "the output tensor", Role::kOutput);
    check_same_dtype(inputs[i], "the input tensor", inputs[0], "the first input tensor");
    check_multiple(outputs[i], "the output tensor", inputs[i], "the input tensor", world_size);
  }
  check_disjoint(outputs, "output_tensors");
  Request request = make_request(Collective::kAllGather, inputs[0]);
  request.numel = total_numel(inputs);
  request.layout_hash = layout_hash(inputs);
  add_whole(&request.input, set, inputs, Role::kInput);
  add_chunks(&request.output, set, outputs, Role::kOutput, world_size);
  return request;
}

Request reduce_scatter_request(TensorSet* set, at::Tensor& output, const Tensors& inputs,
                               const c10d::ReduceOp& op, int world_size) {
  check_tensor(output, "the output tensor", Role::kOutput);
  check_reducible(output, "the output tensor");
  check_count(inputs, "input_list", world_size);
  for (size_t r = 0; r < inputs.size(); ++r) {
    check_tensor(inputs[r], "a tensor of input_list", Role::kInput);
    check_equal_numel(inputs[r], concat("input_list[", r, "]"), output, "the output tensor");
  }
  Request request = make_request(Collective::kReduceScatter, output);
  set_reduce_op(&request, op);
  request.numel = elements_of(output).numel;
  for (const at::Tensor& input : inputs) {
    request.input.add_chunk(set->add(input, Role::kInput), elements_of(input).numel);
  }
  add_whole(&request.output, set, {output}, Role::kOutput);
  return request;
}

Request reduce_scatter_base_request(TensorSet* set, const Tensors& outputs, const Tensors& inputs,
                                    const c10d::ReduceOp& op, int world_size) {
  check_nonempty(outputs, "the list of output tensors");
  PYCOLL_CHECK_ARG(outputs.size() == inputs.size(), "there are ", outputs.size(),
                   " output tensors and ", inputs.size(), " input tensors; pass equally many");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], "the input tensor", Role::kInput);
    check_tensor(outputs[i], "the output tensor", Role::kOutput);
    check_reducible(outputs[i], "the output tensor");
    check_same_dtype(outputs[i], "the output tensor", outputs[0], "the first output tensor");
    check_multiple(inputs[i], "the input tensor", outputs[i], "the output tensor", world_size);
  }
  check_disjoint(outputs, "output_tensors");
  Request request = make_request(Collective::kReduceScatter, outputs[0]);
  set_reduce_op(&request, op);
  request.numel = total_numel(outputs);
  request.layout_hash = layout_hash(outputs);
  add_chunks(&request.input, set, inputs, Role::kInput, world_size);
  add_whole(&request.output, set, outputs, Role::kOutput);
  return request;
}

std::vector<Range> runs_of_equal_dtype(const Tensors& tensors) {
  std::vector<Range> runs;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (runs.empty() || tensors[i].scalar_type() != tensors[i - 1].scalar_type())
      runs.push_back(Range{i, 0});
    ++runs.back().numel;
  }
  return runs;
}

}  // namespace pycoll::torch_adapter
