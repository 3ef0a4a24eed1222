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

py::bytes used(const GradientCounter& counter) {
  const auto& used = counter.used();
  return py::bytes(reinterpret_cast<const char*>(used.data()), used.size());
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
      .def("plan", &GradientCounter::plan, py::arg("expected"), py::arg("bucket_of"),
           py::arg("num_buckets"))
      .def("begin", &GradientCounter::begin, py::arg("synchronises"), py::arg("keeps_order"))
      .def("set_synchronises", &GradientCounter::set_synchronises)
      .def("end", &GradientCounter::end, py::arg("pass_number"))
      .def("active", &GradientCounter::active)
      .def("pending", &GradientCounter::pending, py::arg("bucket"))
      .def("left", &GradientCounter::left)
      .def("arrivals", &GradientCounter::arrivals)
      .def("ready_ns", &GradientCounter::ready_ns)
      .def("used", &used)
      .def("set_used", &set_used, py::arg("used"));
}

}  // namespace pycoll::bindings
