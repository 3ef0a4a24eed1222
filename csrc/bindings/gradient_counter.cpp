#include "torch/gradient_counter.h"

#include <pybind11/stl.h>

#include "bindings/bindings.h"

namespace pycoll::bindings {
namespace {

namespace py = pybind11;
using torch_adapter::GradientCounter;

// On autograd's thread, which does not hold Python's lock.
GradientCounter::Attention with_lock(py::object function) {
  // Shared, because copies of a py::object need the lock.
  auto held = std::shared_ptr<py::object>(new py::object(std::move(function)), [](py::object* f) {
    py::gil_scoped_acquire gil;
    delete f;
  });
  return [held](GradientCounter::Event event, int64_t index) {
    py::gil_scoped_acquire gil;
    (*held)(static_cast<int>(event), index);
  };
}

py::bytes as_bytes(const std::vector<uint8_t>& flags) {
  return py::bytes(reinterpret_cast<const char*>(flags.data()), flags.size());
}

void set_used(GradientCounter& counter, const std::string& used) {
  counter.set_used(std::vector<uint8_t>(used.begin(), used.end()));
}

}  // namespace

void bind_gradient_counter(py::module_& module) {
  py::class_<GradientCounter>(module, "GradientCounter")
      .def(py::init([](std::vector<at::Tensor> parameters, py::object attention) {
             return std::make_unique<GradientCounter>(std::move(parameters),
                                                      with_lock(std::move(attention)));
           }),
           py::arg("parameters"), py::arg("attention"))
      .def("remove", &GradientCounter::remove)
      .def(
          "plan",
          [](GradientCounter& self, std::vector<int64_t> expected, std::vector<int64_t> bucket_of,
             int64_t num_buckets, std::vector<std::optional<at::Tensor>> views, bool as_views) {
            self.plan({std::move(expected), std::move(bucket_of), num_buckets, std::move(views),
                       as_views});
          },
          py::arg("expected"), py::arg("bucket_of"), py::arg("num_buckets"), py::arg("views"),
          py::arg("as_views"))
      .def("begin", &GradientCounter::begin, py::arg("synchronises"), py::arg("keeps_order"))
      .def("set_synchronises", &GradientCounter::set_synchronises)
      .def("end", &GradientCounter::end, py::arg("pass_number"))
      .def("active", &GradientCounter::active)
      .def("pending", &GradientCounter::pending, py::arg("bucket"))
      .def("left", &GradientCounter::left)
      .def("arrivals", &GradientCounter::arrivals)
      .def("ready_ns", &GradientCounter::ready_ns)
      .def("uncopied", &GradientCounter::uncopied, py::arg("bucket"))
      .def("copied", [](const GradientCounter& self) { return as_bytes(self.copied()); })
      .def("used", [](const GradientCounter& self) { return as_bytes(self.used()); })
      .def("set_used", &set_used, py::arg("used"));
}

}  // namespace pycoll::bindings
