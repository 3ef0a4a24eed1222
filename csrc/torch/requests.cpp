#include "torch/requests.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "torch/compat.h"

namespace pycoll::torch_adapter {
namespace {

constexpr uint64_t kHashBasis = 0xcbf29ce484222325;

// Mixes a number into a hash (FNV-1a over its bytes).
uint64_t mix(uint64_t hash, uint64_t number) {
  for (int i = 0; i < 8; ++i) {
    hash = (hash ^ ((number >> (8 * i)) & 0xff)) * 0x100000001b3;
  }
  return hash;
}

uint64_t layout_hash(const Tensors& tensors) {
  if (tensors.size() == 1) return 0;
  uint64_t hash = kHashBasis;
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

// One chunk for each tensor.
void add_list(ChunkView* view, TensorSet* set, const Tensors& tensors, Role role) {
  for (const at::Tensor& tensor : tensors) {
    view->add_chunk(set->add(tensor, role), elements_of(tensor).numel);
  }
}

bool all_of_one_size(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& t) { return t.numel() == tensors[0].numel(); });
}

// Elements of each rank's chunk of a tensor that is split along its first dimension.
std::vector<size_t> chunk_sizes(const at::Tensor& tensor, const std::vector<int64_t>& splits,
                                const char* which, int world_size) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const size_t numel = elements_of(tensor).numel;
  std::vector<size_t> sizes;
  if (splits.empty()) {
    PYCOLL_CHECK_ARG(rows % world_size == 0, "the ", which, " tensor has ", rows, " rows, which ",
                     world_size, " ranks cannot share evenly; pass ", which, "_split_sizes");
    sizes.assign(static_cast<size_t>(world_size), numel / static_cast<size_t>(world_size));
    return sizes;
  }
  PYCOLL_CHECK_ARG(static_cast<int>(splits.size()) == world_size, which, "_split_sizes has ",
                   splits.size(), " entries, but the group has ", world_size,
                   " ranks; pass one for each");
  for (const int64_t split : splits) {
    PYCOLL_CHECK_ARG(split >= 0 && split <= std::numeric_limits<int32_t>::max() * int64_t{1 << 20},
                     which, "_split_sizes contains ", split,
                     "; sizes must be neither negative nor larger than any tensor");
  }
  const uint64_t sum = std::accumulate(splits.begin(), splits.end(), uint64_t{0});
  PYCOLL_CHECK_ARG(sum == static_cast<uint64_t>(rows), which, "_split_sizes add up to ", sum,
                   ", but the ", which, " tensor has ", rows, " rows; make them equal");
  const size_t row_numel = rows == 0 ? 0 : numel / static_cast<size_t>(rows);
  for (const int64_t split : splits) sizes.push_back(static_cast<size_t>(split) * row_numel);
  return sizes;
}

void add_split(ChunkView* view, TensorSet* set, const at::Tensor& tensor,
               const std::vector<size_t>& sizes, Role role) {
  std::byte* data = bytes(set->add(tensor, role));
  for (const size_t numel : sizes) {
    view->add_chunk(data, numel);
    data += numel * itemsize(elements_of(tensor).dtype);
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
  // What travels as bytes is still not the same as bytes.
  if (travels_as_bytes(example)) {
    request.layout_hash = mix(kHashBasis, static_cast<uint64_t>(example.scalar_type())) | 1;
  }
  return request;
}

// What the fingerprint says of chunks, one a rank, whose sizes all ranks know.
void set_chunk_sizes(Request* request, const Tensors& chunks) {
  if (all_of_one_size(chunks)) {
    request->numel = elements_of(chunks[0]).numel;
  } else {
    request->numel = total_numel(chunks);
    request->layout_hash ^= layout_hash(chunks);
  }
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
      const auto* supplement = dynamic_cast<const PremulSumSupplement*>(op.supplement_.get());
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
  request.layout_hash ^= layout_hash(tensors);
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
                           int rank, int world_size) {
  check_tensor(input, "the input tensor", Role::kInput);
  check_count(outputs, "tensor_list", world_size);
  for (const at::Tensor& output : outputs) {
    check_tensor(output, "a tensor of tensor_list", Role::kOutput);
    check_same_dtype(output, "a tensor of tensor_list", input, "the input tensor");
  }
  const size_t me = static_cast<size_t>(rank);
  check_equal_numel(outputs[me], concat("tensor_list[", rank, "], this rank's own,"), input,
                    "the input tensor");
  check_disjoint(outputs, "tensor_list");
  check_places(outputs, {input}, outputs[me], input);
  Request request = make_request(Collective::kAllGather, input);
  set_chunk_sizes(&request, outputs);
  add_whole(&request.input, set, {input}, Role::kInput);
  add_list(&request.output, set, outputs, Role::kOutput);
  return request;
}

Request all_gather_base_request(TensorSet* set, const Tensors& outputs, const Tensors& inputs,
                                int rank, int world_size) {
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
  check_pairs(outputs, inputs,
              [&](size_t i) { return static_cast<ptrdiff_t>(inputs[i].nbytes()) * rank; });
  Request request = make_request(Collective::kAllGather, inputs[0]);
  request.numel = total_numel(inputs);
  request.layout_hash ^= layout_hash(inputs);
  add_whole(&request.input, set, inputs, Role::kInput);
  add_chunks(&request.output, set, outputs, Role::kOutput, world_size);
  return request;
}

Request reduce_scatter_request(TensorSet* set, at::Tensor& output, const Tensors& inputs,
                               const c10d::ReduceOp& op, int rank, int world_size) {
  check_tensor(output, "the output tensor", Role::kOutput);
  check_reducible(output, "the output tensor");
  check_count(inputs, "input_list", world_size);
  for (const at::Tensor& input : inputs) {
    check_tensor(input, "a tensor of input_list", Role::kInput);
    check_same_dtype(input, "a tensor of input_list", output, "the output tensor");
  }
  const size_t me = static_cast<size_t>(rank);
  check_equal_numel(inputs[me], concat("input_list[", rank, "], this rank's own,"), output,
                    "the output tensor");
  check_places({output}, inputs, output, inputs[me]);
  Request request = make_request(Collective::kReduceScatter, output);
  set_reduce_op(&request, op);
  set_chunk_sizes(&request, inputs);
  add_list(&request.input, set, inputs, Role::kInput);
  add_whole(&request.output, set, {output}, Role::kOutput);
  return request;
}

Request reduce_scatter_base_request(TensorSet* set, const Tensors& outputs, const Tensors& inputs,
                                    const c10d::ReduceOp& op, int rank, int world_size) {
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
  check_pairs(outputs, inputs,
              [&](size_t i) { return -static_cast<ptrdiff_t>(outputs[i].nbytes()) * rank; });
  Request request = make_request(Collective::kReduceScatter, outputs[0]);
  set_reduce_op(&request, op);
  request.numel = total_numel(outputs);
  request.layout_hash ^= layout_hash(outputs);
  add_chunks(&request.input, set, inputs, Role::kInput, world_size);
  add_whole(&request.output, set, outputs, Role::kOutput);
  return request;
}

Request reduce_request(TensorSet* set, at::Tensor& tensor, const c10d::ReduceOp& op, int root,
                       bool is_root) {
  const Role role = is_root ? Role::kInOut : Role::kInput;
  check_tensor(tensor, "tensor", role);
  check_reducible(tensor, "tensor");
  Request request = make_request(Collective::kReduce, tensor);
  set_reduce_op(&request, op);
  request.root = root;
  request.numel = elements_of(tensor).numel;
  add_whole(&request.input, set, {tensor}, role);
  if (is_root) request.output = request.input;
  return request;
}

Request gather_request(TensorSet* set, const Tensors& outputs, const at::Tensor& input, int root,
                       bool is_root, int world_size) {
  check_tensor(input, "the input tensor", Role::kInput);
  Request request = make_request(Collective::kGather, input);
  request.root = root;
  request.numel = elements_of(input).numel;
  add_whole(&request.input, set, {input}, Role::kInput);
  if (!is_root) {
    PYCOLL_CHECK_ARG(outputs.empty(), "gather_list has ", outputs.size(),
                     " tensors on a rank that is not the destination; pass None there");
    return request;
  }
  check_count(outputs, "gather_list", world_size);
  for (size_t r = 0; r < outputs.size(); ++r) {
    check_tensor(outputs[r], "a tensor of gather_list", Role::kOutput);
    check_equal_numel(outputs[r], concat("gather_list[", r, "]"), input, "the input tensor");
  }
  check_disjoint(outputs, "gather_list");
  check_places(outputs, {input}, outputs[static_cast<size_t>(root)], input);
  add_list(&request.output, set, outputs, Role::kOutput);
  return request;
}

Request scatter_request(TensorSet* set, at::Tensor& output, const Tensors& inputs, int root,
                        bool is_root, int world_size) {
  check_tensor(output, "the output tensor", Role::kOutput);
  Request request = make_request(Collective::kScatter, output);
  request.root = root;
  request.numel = elements_of(output).numel;
  if (is_root) {
    check_count(inputs, "scatter_list", world_size);
    for (size_t r = 0; r < inputs.size(); ++r) {
      check_tensor(inputs[r], "a tensor of scatter_list", Role::kInput);
      check_equal_numel(inputs[r], concat("scatter_list[", r, "]"), output, "the output tensor");
    }
    check_places({output}, inputs, output, inputs[static_cast<size_t>(root)]);
    add_list(&request.input, set, inputs, Role::kInput);
  } else {
    PYCOLL_CHECK_ARG(inputs.empty(), "scatter_list has ", inputs.size(),
                     " tensors on a rank that is not the source; pass None there");
  }
  add_whole(&request.output, set, {output}, Role::kOutput);
  return request;
}

Request all_to_all_request(TensorSet* set, const Tensors& outputs, const Tensors& inputs,
                           int world_size) {
  check_count(outputs, "output_tensor_list", world_size);
  check_count(inputs, "input_tensor_list", world_size);
  for (size_t r = 0; r < outputs.size(); ++r) {
    check_tensor(outputs[r], "a tensor of output_tensor_list", Role::kOutput);
    check_tensor(inputs[r], "a tensor of input_tensor_list", Role::kInput);
    check_same_dtype(outputs[r], "a tensor of output_tensor_list", inputs[0],
                     "the first input tensor");
    check_same_dtype(inputs[r], "a tensor of input_tensor_list", inputs[0],
                     "the first input tensor");
  }
  check_disjoint(outputs, "output_tensor_list");
  check_apart(outputs, inputs);
  Request request = make_request(Collective::kAllToAll, inputs[0]);
  request.numel = total_numel(inputs);
  add_list(&request.input, set, inputs, Role::kInput);
  add_list(&request.output, set, outputs, Role::kOutput);
  return request;
}

Request all_to_all_single_request(TensorSet* set, at::Tensor& output, at::Tensor& input,
                                  const std::vector<int64_t>& output_splits,
                                  const std::vector<int64_t>& input_splits, int world_size) {
  check_tensor(output, "the output tensor", Role::kOutput);
  check_tensor(input, "the input tensor", Role::kInput);
  check_same_dtype(output, "the output tensor", input, "the input tensor");
  check_apart({output}, {input});
  Request request = make_request(Collective::kAllToAll, input);
  const std::vector<size_t> in = chunk_sizes(input, input_splits, "input", world_size);
  const std::vector<size_t> out = chunk_sizes(output, output_splits, "output", world_size);
  request.numel = elements_of(input).numel;
  add_split(&request.input, set, input, in, Role::kInput);
  add_split(&request.output, set, output, out, Role::kOutput);
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
