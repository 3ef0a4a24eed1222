// The shortest way from Python to a group of pycoll, past torch's dispatcher and its options.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/bindings.h"
#include "torch/process_group.h"

namespace pycoll::bindings {
namespace {

namespace py = pybind11;
using torch_adapter::ProcessGroupPycoll;
using BackendPtr = c10::intrusive_ptr<ProcessGroupPycoll>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Null unless `group` is a process group whose backend for CPU tensors is pycoll's.
BackendPtr backend_of(const py::object& group) {
  if (!py::isinstance<c10d::ProcessGroup>(group)) return nullptr;
  const auto pg = group.cast<GroupPtr>();
  if (pg->getDeviceTypes().empty()) return nullptr;
  try {
    return c10::dynamic_intrusive_pointer_cast<ProcessGroupPycoll>(
        pg->getBackend(c10::DeviceType::CPU));
  } catch (const c10::Error&) {  // it has none for the CPU
    return nullptr;
  }
}

// Whether it was done: false, and nothing has happened, for what is no tensor or no group of pycoll. The caller's slow way says
// what is wrong with it.
bool all_reduce(const py::object& group, const py::object& tensor, const c10d::ReduceOp& op) {
  if (!THPVariable_Check(tensor.ptr())) return false;
  const BackendPtr backend = backend_of(group);
  if (backend == nullptr) return false;
  std::vector<at::Tensor> tensors{THPVariable_Unpack(tensor.ptr())};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = false;
  py::gil_scoped_release release;
  backend->allreduce(tensors, options)->wait();
  return true;
}

}  // namespace

void bind_direct(py::module_& module) {
  module.def("backend_of", &backend_of, py::arg("group"));
  module.def("all_reduce", &all_reduce, py::arg("group"), py::arg("tensor"), py::arg("op"));
}

}  // namespace pycoll::bindings
