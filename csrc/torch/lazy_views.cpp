// Lazily conjugated and negated tensors as in-place arguments of collectives.
//
// torch's dispatcher gives a backend resolved copies of such tensors, and what the backend writes there is lost. These kernels stand
// before its fallback: for a group of pycoll they pass the tensors on as they are (TensorSet resolves them and copies results
// back), for any other group they do what the fallback does.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/native/MathBitsFallback.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include "torch/process_group.h"

namespace pycoll::torch_adapter {
namespace {

struct ConjugateFallback final : at::native::MathOpFallback {
  ConjugateFallback() : MathOpFallback(c10::DispatchKey::Conjugate, "conjugate") {}
  bool is_bit_set(const at::Tensor& tensor) override { return tensor.is_conj(); }
};

struct NegativeFallback final : at::native::MathOpFallback {
  NegativeFallback() : MathOpFallback(c10::DispatchKey::Negative, "negation") {}
  bool is_bit_set(const at::Tensor& tensor) override { return tensor.is_neg(); }
};

// Whether the group among the operator's arguments moves CPU tensors with pycoll.
bool is_ours(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  for (const c10::IValue& argument : arguments) {
    if (!argument.isCustomClass()) continue;
    const auto group = c10::dynamic_intrusive_pointer_cast<c10d::ProcessGroup>(
        argument.toObject()->getSlot(0).toCapsule());
    if (group == nullptr) continue;
    try {
      return dynamic_cast<const ProcessGroupPycoll*>(group->getBackend(at::kCPU).get()) != nullptr;
    } catch (const c10::Error&) {
      return false;  // no backend for CPU tensors
    }
  }
  return false;
}

template <class Fallback>
void pass_on_or_fall_back(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                          torch::jit::Stack* stack) {
  Fallback fallback;
  if (is_ours(op, *stack)) {
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, fallback.key),
                       stack);
  } else {
    fallback.fallback_impl(op, keys, stack);
  }
}

constexpr const char* kOperators[] = {
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "reduce_",
    "allgather_",
    "_allgather_base_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "gather_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
    "alltoall_",
    "alltoall_base_",
    "send",
    "recv_",
    "recv_any_source_",
};

template <class Fallback>
void implement(torch::Library* library) {
  for (const char* name : kOperators) {
    library->impl(name,
                  torch::CppFunction::makeFromBoxedFunction<&pass_on_or_fall_back<Fallback>>());
  }
}

TORCH_LIBRARY_IMPL(c10d, Conjugate, library) { implement<ConjugateFallback>(&library); }
TORCH_LIBRARY_IMPL(c10d, Negative, library) { implement<NegativeFallback>(&library); }

}  // namespace
}  // namespace pycoll::torch_adapter
