// One function for each folder whose names Python sees.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pycoll::bindings {

void bind_collectives(pybind11::module_& module);
void bind_shared_memory(pybind11::module_& module);
void bind_torch(pybind11::module_& module);
void bind_direct(pybind11::module_& module);
void bind_gradient_counter(pybind11::module_& module);

}  // namespace pycoll::bindings
