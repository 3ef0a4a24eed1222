// The shortest way from Python to a group of pycoll, past torch's dispatcher and its options.
#include <torch/csrc/Exceptions.h>
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

// The group of the last call and its backend: to find the one by the other takes pybind and torch longer than a small tensor is
// exchanged. Held by weak references: a group ends when its owner wants it to. Used with the interpreter's lock held.
class LastGroup {
 public:
  // Null as backend_of says.
  BackendPtr backend(PyObject* group) {
    if (weak_ != nullptr && is(group)) return backend_.lock();
    const BackendPtr found = backend_of(py::reinterpret_borrow<py::object>(group));
    if (found == nullptr) return nullptr;
    Py_XDECREF(weak_);
    weak_ = PyWeakref_NewRef(group, nullptr);
    if (weak_ == nullptr) throw py::error_already_set();
    backend_ = c10::weak_intrusive_ptr<ProcessGroupPycoll>(found);
    return found;
  }

 private:
  bool is(PyObject* group) const {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* known = nullptr;
    if (PyWeakref_GetRef(weak_, &known) != 1) return false;
    Py_DECREF(known);
    return known == group;
#else
    return PyWeakref_GetObject(weak_) == group;
#endif
  }

  PyObject* weak_ = nullptr;
  c10::weak_intrusive_ptr<ProcessGroupPycoll> backend_{BackendPtr()};
};

// all_reduce(group, tensor, op): whether it was done; False, and nothing has happened, for what is no tensor or no group of pycoll. The
// caller's slow way says what is wrong with it. `op` is the number of a torch.distributed.ReduceOp.RedOpType. A function of Python's
// own kind, since pybind11 takes longer to look at three arguments than the rest of the call takes.
PyObject* all_reduce(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  try {
    if (count != 3) throw py::type_error("all_reduce takes a group, a tensor and an op");
    if (!THPVariable_Check(arguments[1])) Py_RETURN_FALSE;
    static LastGroup* const last = new LastGroup();  // outlives the interpreter
    const BackendPtr backend = last->backend(arguments[0]);
    if (backend == nullptr) Py_RETURN_FALSE;
    const long op = PyLong_AsLong(arguments[2]);
    if (op == -1 && PyErr_Occurred() != nullptr) return nullptr;
    at::Tensor tensor = THPVariable_Unpack(arguments[1]);
    {
      py::gil_scoped_release release;
      backend->all_reduce_now(tensor, static_cast<c10d::ReduceOp::RedOpType>(op));
    }
    Py_RETURN_TRUE;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyMethodDef kAllReduce = {"all_reduce",
                          reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(all_reduce)),
                          METH_FASTCALL, nullptr};

}  // namespace

void bind_direct(py::module_& module) {
  module.def("backend_of", &backend_of, py::arg("group"));
  module.add_object("all_reduce",
                    py::reinterpret_steal<py::object>(PyCFunction_New(&kAllReduce, nullptr)));
}

}  // namespace pycoll::bindings
