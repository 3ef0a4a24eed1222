// Tensors as plain memory: which ones can be, and what has to be copied first.
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/dtype.h"
#include "collectives/request.h"

namespace pycoll::torch_adapter {

enum class Role : uint8_t { kInput, kOutput, kInOut };

// The element type that moves `tensor`'s elements, and how many of them it has. Types that pycoll only moves travel as bytes.
struct Elements {
  DType dtype;
  size_t numel;
};
Elements elements_of(const at::Tensor& tensor);

// Of a type that pycoll moves but does not know how to reduce.
bool travels_as_bytes(const at::Tensor& tensor);
// "float32", as Python says it.
const char* dtype_name(const at::Tensor& tensor);

// Raises kInvalidArgument, naming `argument`, unless the tensor is dense, on a CPU or CUDA device, not quantised and, for an output,
// does not overlap itself.
void check_tensor(const at::Tensor& tensor, const char* argument, Role role);
// Raises kInvalidArgument unless both have the same dtype.
void check_same_dtype(const at::Tensor& a, const char* a_name, const at::Tensor& b,
                      const char* b_name);

// Raises kInvalidArgument if two of the tensors share memory: one result would overwrite the other.
void check_disjoint(const std::vector<at::Tensor>& tensors, const char* argument);
// Raises kInvalidArgument if an output shares memory with an input.
void check_apart(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

// Raises kInvalidArgument if an output shares memory with an input, unless the input begins `place` bytes behind the output,
// which is where the collective would put it anyway. Where one of them is not contiguous a copy stands in for it, and
// sharing does no harm.
inline constexpr ptrdiff_t kNowhere = PTRDIFF_MIN;
void check_place(const at::Tensor& output, const at::Tensor& input, ptrdiff_t place);
// The same for lists of one tensor a rank: in place means that this rank's two tensors are one.
void check_places(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                  const at::Tensor& own_output, const at::Tensor& own_input);
// The same for lists of which input i belongs to output i, and may lie `place(i)` bytes behind it. The outputs are disjoint.
void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                 const std::function<ptrdiff_t(size_t)>& place);

// The tensors of one operation. Those whose logical order is not their order in memory (strides, lazy conjugation or
// negation) get a contiguous stand-in, filled before the operation reads and copied back after it has written, when it
// is this operation's turn. Must outlive the operation, and be destroyed on a thread of the program.
class TensorSet {
 public:
  // The address where the operation finds the elements of `tensor`.
  void* add(const at::Tensor& tensor, Role role);
  // What the operation writes to, for autograd: in-place results must be seen.
  void bump_versions() const;
  bool needs_copies() const { return !stand_ins_.empty(); }
  void fill_stand_ins() const;
  void copy_back() const;

 private:
  struct StandIn {
    at::Tensor user, contiguous;
    Role role;
  };
  std::vector<at::Tensor> held_, written_;
  std::vector<StandIn> stand_ins_;
};

}  // namespace pycoll::torch_adapter
