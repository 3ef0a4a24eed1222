// Turns the tensors of torch's calls into requests of the core. Every function checks its tensors first and raises
// kInvalidArgument before anything moves; the memory in the requests belongs to the TensorSet.
#pragma once

#include <span>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "collectives/request.h"
#include "topology/partition.h"
#include "torch/tensors.h"

namespace pycoll::torch_adapter {

using Tensors = std::vector<at::Tensor>;

// What a call consists of: mostly one request, which then needs no vector.
inline std::span<Request> all(Request& request) { return {&request, 1}; }
inline std::span<Request> all(std::vector<Request>& requests) { return requests; }

// The only tensor of a list that c10d passes.
at::Tensor& only(Tensors& tensors, const char* argument);

// Sets op and, for PREMUL_SUM, the factor.
void set_reduce_op(Request* request, const c10d::ReduceOp& op);

Request all_reduce_request(TensorSet* set, at::Tensor& tensor, const c10d::ReduceOp& op);
// Several tensors of one dtype as one operation.
Request all_reduce_coalesced_request(TensorSet* set, const Tensors& tensors,
                                     const c10d::ReduceOp& op);
Request broadcast_request(TensorSet* set, at::Tensor& tensor, int root, bool is_root);
// outputs: one tensor a rank, of the sizes that the ranks' inputs have.
Request all_gather_request(TensorSet* set, const Tensors& outputs, const at::Tensor& input,
                           int rank, int world_size);
// outputs[i] holds world_size times inputs[i]; one operation.
Request all_gather_base_request(TensorSet* set, const Tensors& outputs, const Tensors& inputs,
                                int rank, int world_size);
// inputs: one tensor a rank, of the sizes that the ranks' outputs have.
Request reduce_scatter_request(TensorSet* set, at::Tensor& output, const Tensors& inputs,
                               const c10d::ReduceOp& op, int rank, int world_size);
Request reduce_scatter_base_request(TensorSet* set, const Tensors& outputs, const Tensors& inputs,
                                    const c10d::ReduceOp& op, int rank, int world_size);

Request reduce_request(TensorSet* set, at::Tensor& tensor, const c10d::ReduceOp& op, int root,
                       bool is_root);
// outputs: one tensor a rank at the root, empty elsewhere.
Request gather_request(TensorSet* set, const Tensors& outputs, const at::Tensor& input, int root,
                       bool is_root, int world_size);
// inputs: one tensor a rank at the root, empty elsewhere.
Request scatter_request(TensorSet* set, at::Tensor& output, const Tensors& inputs, int root,
                        bool is_root, int world_size);
Request all_to_all_request(TensorSet* set, const Tensors& outputs, const Tensors& inputs,
                           int world_size);
// Split sizes count rows of the first dimension; an empty list divides it evenly.
Request all_to_all_single_request(TensorSet* set, at::Tensor& output, at::Tensor& input,
                                  const std::vector<int64_t>& output_splits,
                                  const std::vector<int64_t>& input_splits, int world_size);

// Splits a list into runs of equal dtype: an operation has one dtype.
std::vector<Range> runs_of_equal_dtype(const Tensors& tensors);

}  // namespace pycoll::torch_adapter
