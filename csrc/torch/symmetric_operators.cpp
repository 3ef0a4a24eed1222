// The all_reduce operators of torch.ops.symm_mem on CPU tensors. torch defines them, and has kernels for GPUs only.
//
// There they differ in how they move data. Here all are one collective, which picks its algorithm by itself and gives the same bits
// under each name. Nothing is copied where tensors of all ranks lie in symmetric memory; elsewhere they work as well.
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include "torch/errors.h"
#include "torch/requests.h"
#include "torch/shared_memory.h"
#include "torch/symmetric_memory.h"

namespace pycoll::torch_adapter {
namespace {

ReduceOp op_of(const std::string& name) {
  if (name == "sum") return ReduceOp::kSum;
  if (name == "avg") return ReduceOp::kAvg;
  fail(ErrorKind::kInvalidArgument, "reduce_op is '", name,
       "', but symm_mem's all_reduce operators know 'sum' and 'avg'");
}

// Refused arguments are told to the other ranks, which would wait otherwise.
void all_reduce(const at::Tensor& input, const at::Tensor& output, const std::string& reduce_op,
                const std::string& group_name) {
  translated([&] {
    const std::shared_ptr<Communicator> communicator = communicator_of(group_name);
    TensorSet tensors;
    Request request;
    try {
      check_tensor(input, "input", Role::kInput);
      check_tensor(output, "output", Role::kOutput);
      check_same_dtype(input, "input", output, "output");
      PYCOLL_CHECK_ARG(input.numel() == output.numel(), "input has ", input.numel(),
                       " elements and output ", output.numel(), "; make them equal");
      check_place(output, input, 0);
      const Elements elements = elements_of(input);
      request.collective = Collective::kAllReduce;
      request.op = op_of(reduce_op);
      request.dtype = elements.dtype;
      request.numel = elements.numel;
      const bool in_place = input.is_same(output);
      void* out = tensors.add(output, in_place ? Role::kInOut : Role::kOutput);
      void* in = in_place ? out : tensors.add(input, Role::kInput);
      request.input.add_chunk(in, elements.numel);
      request.output.add_chunk(out, elements.numel);
    } catch (const Error& error) {
      communicator->refuse(Collective::kAllReduce, error.what());
      throw;
    }
    request.before = [&] { tensors.fill_stand_ins(); };
    request.after = [&] { tensors.copy_back(); };
    tensors.bump_versions();
    communicator->run(std::move(request), communicator->timeout());
  });
}

at::Tensor& in_place(at::Tensor& input, std::string reduce_op, std::string group_name) {
  all_reduce(input, input, reduce_op, group_name);
  return input;
}

at::Tensor& into(const at::Tensor& input, std::string reduce_op, std::string group_name,
                 at::Tensor& output) {
  all_reduce(input, output, reduce_op, group_name);
  return output;
}

// two_shot_all_reduce_out may use its input as scratch on GPUs; here it stays as it is.
at::Tensor& two_shot_into(at::Tensor& input, std::string reduce_op, std::string group_name,
                          at::Tensor& output) {
  return into(input, std::move(reduce_op), std::move(group_name), output);
}

at::Tensor to_new(const at::Tensor& input, std::string reduce_op, std::string group_name) {
  at::Tensor output = shared_empty(input.sizes(), input.scalar_type());
  return into(input, std::move(reduce_op), std::move(group_name), output);
}

// For what is found wrong before all_reduce(): tells the other ranks, and raises.
[[noreturn]] void refuse(const std::string& group_name, const std::string& reason) {
  translated([&] { communicator_of(group_name)->refuse(Collective::kAllReduce, reason); });
  throw_as_torch(Error(ErrorKind::kInvalidArgument, "pycoll: " + reason));
}

// The symmetric buffer gets a copy of the input first, so that peers need not be able to reach that.
at::Tensor& copy_into(const at::Tensor& buffer, const at::Tensor& local_input,
                      std::string reduce_op, std::string group_name, at::Tensor& output) {
  if (!buffer.is_contiguous() || buffer.numel() < local_input.numel() ||
      buffer.scalar_type() != local_input.scalar_type()) {
    refuse(group_name,
           concat("symm_buffer has ", buffer.numel(), " elements of ", buffer.scalar_type(),
                  " with strides ", buffer.strides(), ", and local_input ", local_input.numel(),
                  " of ", local_input.scalar_type(),
                  "; give a contiguous buffer of the same dtype that is not smaller"));
  }
  const at::Tensor staged = buffer.flatten().narrow(0, 0, local_input.numel());
  staged.copy_(local_input.flatten());
  return into(staged.view(local_input.sizes()), std::move(reduce_op), std::move(group_name),
              output);
}

at::Tensor copy_to_new(const at::Tensor& buffer, const at::Tensor& local_input,
                       std::string reduce_op, std::string group_name) {
  at::Tensor output = shared_empty(local_input.sizes(), local_input.scalar_type());
  return copy_into(buffer, local_input, std::move(reduce_op), std::move(group_name), output);
}

// ---- boxed: torch ends the program where kernels of an operator have different C++ types, and those of its own kernels for GPUs,
// which only its builds for CUDA have, are not the same in all versions.

template <class Result, class... Args, size_t... I>
void call(Result (*fn)(Args...), torch::jit::Stack* stack, std::index_sequence<I...>) {
  constexpr size_t kCount = sizeof...(Args);
  std::tuple<std::decay_t<Args>...> arguments{
      torch::jit::peek(*stack, I, kCount).template to<std::decay_t<Args>>()...};
  at::Tensor result = std::apply(fn, arguments);
  torch::jit::drop(*stack, kCount);
  torch::jit::push(*stack, std::move(result));
}

template <class Result, class... Args>
void call(Result (*fn)(Args...), torch::jit::Stack* stack) {
  call(fn, stack, std::index_sequence_for<Args...>());
}

template <auto fn>
void call_boxed(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  call(fn, stack);
}

template <auto fn>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<&call_boxed<fn>>();
}

TORCH_LIBRARY_IMPL(symm_mem, CPU, library) {
  library.impl("multimem_all_reduce_", boxed<&in_place>());
  library.impl("multimem_one_shot_all_reduce", boxed<&to_new>());
  library.impl("multimem_one_shot_all_reduce_out", boxed<&into>());
  library.impl("one_shot_all_reduce", boxed<&to_new>());
  library.impl("one_shot_all_reduce_out", boxed<&into>());
  library.impl("one_shot_all_reduce_copy", boxed<&copy_to_new>());
  library.impl("one_shot_all_reduce_copy_out", boxed<&copy_into>());
  library.impl("two_shot_all_reduce_", boxed<&in_place>());
  library.impl("two_shot_all_reduce_out", boxed<&two_shot_into>());
}

}  // namespace
}  // namespace pycoll::torch_adapter
