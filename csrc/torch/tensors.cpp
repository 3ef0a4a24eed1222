#include "torch/tensors.h"

#include <algorithm>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include "base/error.h"

namespace pycoll::torch_adapter {

Elements elements_of(const at::Tensor& tensor) {
  const size_t numel = static_cast<size_t>(tensor.numel());
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return {DType::kFloat64, numel};
    case at::kFloat:
      return {DType::kFloat32, numel};
    case at::kHalf:
      return {DType::kFloat16, numel};
    case at::kBFloat16:
      return {DType::kBFloat16, numel};
    case at::kFloat8_e4m3fn:
      return {DType::kFloat8E4M3FN, numel};
    case at::kFloat8_e5m2:
      return {DType::kFloat8E5M2, numel};
    case at::kFloat8_e4m3fnuz:
      return {DType::kFloat8E4M3FNUZ, numel};
    case at::kFloat8_e5m2fnuz:
      return {DType::kFloat8E5M2FNUZ, numel};
    case at::kChar:
      return {DType::kInt8, numel};
    case at::kShort:
      return {DType::kInt16, numel};
    case at::kInt:
      return {DType::kInt32, numel};
    case at::kLong:
      return {DType::kInt64, numel};
    case at::kByte:
      return {DType::kUInt8, numel};
    case at::kUInt16:
      return {DType::kUInt16, numel};
    case at::kUInt32:
      return {DType::kUInt32, numel};
    case at::kUInt64:
      return {DType::kUInt64, numel};
    case at::kBool:
      return {DType::kBool, numel};
    case at::kComplexHalf:
      return {DType::kComplex32, numel};
    case at::kComplexFloat:
      return {DType::kComplex64, numel};
    case at::kComplexDouble:
      return {DType::kComplex128, numel};
    default:
      return {DType::kUInt8, static_cast<size_t>(tensor.nbytes())};
  }
}

bool travels_as_bytes(const at::Tensor& tensor) {
  return elements_of(tensor).dtype == DType::kUInt8 && tensor.scalar_type() != at::kByte;
}

const char* dtype_name(const at::Tensor& tensor) {
  return travels_as_bytes(tensor) ? c10::toString(tensor.scalar_type())
                                  : name(elements_of(tensor).dtype);
}

// Whether two elements lie at the same address.
static bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 0) return false;
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  // Each stride beyond all that the smaller ones reach: no two meet.
  int64_t reach = 0;
  bool is_nested = true;
  for (const auto& [stride, size] : dims) {
    is_nested &= stride > reach;
    reach += stride * (size - 1);
  }
  if (is_nested) return false;
  if (reach + 1 < tensor.numel()) return true;  // fewer places than elements
  std::vector<bool> taken(static_cast<size_t>(reach) + 1);
  std::vector<int64_t> index(dims.size());
  for (int64_t i = 0, at = 0; i < tensor.numel(); ++i) {
    if (taken[static_cast<size_t>(at)]) return true;
    taken[static_cast<size_t>(at)] = true;
    for (size_t d = 0; d < dims.size(); ++d) {
      at += dims[d].first;
      if (++index[d] < dims[d].second) break;
      at -= dims[d].first * dims[d].second;
      index[d] = 0;
    }
  }
  return false;
}

void check_tensor(const at::Tensor& tensor, const char* argument, Role role) {
  PYCOLL_CHECK_ARG(tensor.defined(), argument, " is not a tensor");
  PYCOLL_CHECK_ARG(tensor.layout() == at::kStrided, argument, " has layout ", tensor.layout(),
                   "; convert it with to_dense()");
  PYCOLL_CHECK_ARG(
      tensor.device().is_cpu() || tensor.device().is_cuda(), argument, " is on ",
      tensor.device().str(),
      ", and pycoll moves tensors of CPUs and of CUDA devices; move it with .cpu(), or "
      "use another backend for "
      "that device, as in init_process_group(\"cpu:pycoll,xpu:xccl\")");
  PYCOLL_CHECK_ARG(!tensor.is_quantized(), argument, " is quantised (", dtype_name(tensor),
                   "); send its int_repr(), scale and zero point instead");
  PYCOLL_CHECK_ARG(role == Role::kInput || !overlaps_itself(tensor), argument,
                   " overlaps itself (strides ", tensor.strides(),
                   "), so that one result would overwrite another; clone() it first");
}

void check_same_dtype(const at::Tensor& a, const char* a_name, const at::Tensor& b,
                      const char* b_name) {
  PYCOLL_CHECK_ARG(a.scalar_type() == b.scalar_type(), a_name, " is ", dtype_name(a), " but ",
                   b_name, " is ", dtype_name(b), "; give both the same dtype");
}

namespace {

const char* begin_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

const char* end_of(const at::Tensor& tensor) { return begin_of(tensor) + tensor.nbytes(); }

// Contiguous tensors are intervals of addresses. Appends their indices in that order, and those of the others; empty ones
// are left out.
void sort_intervals(const std::vector<at::Tensor>& tensors, std::vector<size_t>* intervals,
                    std::vector<size_t>* others) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() == 0) continue;
    (tensors[i].is_contiguous() ? intervals : others)->push_back(i);
  }
  const auto is_before = [&](size_t a, size_t b) {
    return begin_of(tensors[a]) < begin_of(tensors[b]);
  };
  // Often they lie in order already.
  if (!std::is_sorted(intervals->begin(), intervals->end(), is_before))
    std::sort(intervals->begin(), intervals->end(), is_before);
}

}  // namespace

void check_disjoint(const std::vector<at::Tensor>& tensors, const char* argument) {
  if (tensors.size() < 2) return;
  const auto refuse = [&](size_t a, size_t b) {
    fail(ErrorKind::kInvalidArgument, argument, "[", std::min(a, b), "] and ", argument, "[",
         std::max(a, b),
         "] share memory: outputs overlap, so that one result would overwrite the other; give each "
         "its own tensor");
  };
  // Sorted intervals: neighbours tell. The few others are compared with all.
  std::vector<size_t> intervals, others;
  sort_intervals(tensors, &intervals, &others);
  for (size_t i = 1; i < intervals.size(); ++i) {
    if (end_of(tensors[intervals[i - 1]]) > begin_of(tensors[intervals[i]]))
      refuse(intervals[i - 1], intervals[i]);
  }
  for (size_t a : others) {
    for (size_t b = 0; b < tensors.size(); ++b) {
      const auto status =
          a == b ? at::MemOverlapStatus::No : at::get_overlap_status(tensors[a], tensors[b]);
      if (status == at::MemOverlapStatus::Full || status == at::MemOverlapStatus::Partial)
        refuse(a, b);
    }
  }
}

void check_apart(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  for (const at::Tensor& output : outputs) {
    for (const at::Tensor& input : inputs) {
      const auto status = at::get_overlap_status(output, input);
      PYCOLL_CHECK_ARG(
          status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial,
          "an output shares memory with an input, which would be overwritten before it is sent; "
          "give the outputs memory of their own");
    }
  }
}

void check_place(const at::Tensor& output, const at::Tensor& input, ptrdiff_t place) {
  if (output.numel() == 0 || input.numel() == 0) return;
  if (!output.is_contiguous() || !input.is_contiguous()) return;
  if (end_of(input) <= begin_of(output) || end_of(output) <= begin_of(input)) return;
  const ptrdiff_t behind = begin_of(input) - begin_of(output);
  PYCOLL_CHECK_ARG(place != kNowhere && behind == place, "an input of ", input.nbytes(),
                   " bytes begins ", behind, " bytes behind an output of ", output.nbytes(),
                   " bytes and shares memory with it; in place means that a rank's own part of the "
                   "one is the other; give the output memory of its own");
}

void check_places(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                  const at::Tensor& own_output, const at::Tensor& own_input) {
  for (const at::Tensor& output : outputs) {
    for (const at::Tensor& input : inputs) {
      check_place(output, input,
                  output.is_same(own_output) && input.is_same(own_input) ? 0 : kNowhere);
    }
  }
}

void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                 const std::function<ptrdiff_t(size_t)>& place) {
  std::vector<size_t> intervals, others;
  sort_intervals(outputs, &intervals, &others);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& input = inputs[i];
    if (input.numel() == 0 || !input.is_contiguous()) continue;
    auto o = std::partition_point(intervals.begin(), intervals.end(), [&](size_t index) {
      return end_of(outputs[index]) <= begin_of(input);
    });
    for (; o != intervals.end() && begin_of(outputs[*o]) < end_of(input); ++o)
      check_place(outputs[*o], input, *o == i ? place(i) : kNowhere);
  }
}

void TensorSet::bump_versions() const {
  for (const at::Tensor& tensor : written_) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void* TensorSet::add(const at::Tensor& tensor, Role role) {
  if (!held_.empty()) {
    PYCOLL_CHECK_ARG(tensor.device() == held_[0].device(), "a tensor is on ", tensor.device().str(),
                     " and another one of the same call on ", held_[0].device().str(),
                     "; give all the same device");
  }
  held_.push_back(tensor);
  if (role != Role::kInput) written_.push_back(tensor);
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    // const_data_ptr() does not copy a lazily cloned storage; outputs need their own.
    return role == Role::kInput ? const_cast<void*>(tensor.const_data_ptr())
                                : tensor.mutable_data_ptr();
  }
  at::Tensor contiguous =
      at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  stand_ins_.push_back(StandIn{tensor, contiguous, role});
  return contiguous.mutable_data_ptr();
}

void TensorSet::fill_stand_ins() const {
  const at::AutoDispatchBelowADInplaceOrView guard;
  for (const StandIn& stand_in : stand_ins_) {
    if (stand_in.role != Role::kOutput) stand_in.contiguous.copy_(stand_in.user);
  }
}

void TensorSet::copy_back() const {
  const at::AutoDispatchBelowADInplaceOrView guard;
  for (const StandIn& stand_in : stand_ins_) {
    if (stand_in.role != Role::kInput) stand_in.user.copy_(stand_in.contiguous);
  }
}

}  // namespace pycoll::torch_adapter
