#include "torch/shared_memory.h"

#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "torch/symmetric_memory.h"

namespace pycoll::bindings {
namespace {

namespace py = pybind11;
using namespace torch_adapter;

bool is_shared_tensor(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         is_shared(tensor.storage().data(), tensor.storage().nbytes());
}

}  // namespace

void bind_shared_memory(py::module_& module) {
  register_symmetric_memory();
  module.def(
      "shared_empty",
      [](const std::vector<int64_t>& size, at::ScalarType dtype) {
        return shared_empty(size, dtype);
      },
      py::arg("size"), py::arg("dtype"), py::call_guard<py::gil_scoped_release>());
  module.def("is_shared_tensor", &is_shared_tensor, py::arg("tensor"));
  module.def("install_shared_allocator", &install_shared_allocator);
  module.def("set_shared_for_process", &set_shared_for_process, py::arg("on"));
  module.def("shared_for_process", &shared_for_process);
  module.def(
      "set_shared_for_thread",
      [](int choice) {
        return static_cast<int>(set_shared_for_thread(static_cast<ThreadChoice>(choice)));
      },
      py::arg("choice"), "0: as the process, 1: shared, 2: plain. Returns the choice before.");
  module.def("shared_stats", [] {
    const SharedHeap::Stats stats = shared_stats();
    return py::dict(py::arg("bytes_in_use") = stats.bytes_in_use,
                    py::arg("bytes_cached") = stats.bytes_cached,
                    py::arg("num_blocks") = stats.num_blocks);
  });
  module.def("trim_shared", &trim_shared);
}

}  // namespace pycoll::bindings
