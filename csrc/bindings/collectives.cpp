#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "collectives/selector.h"

namespace pycoll::bindings {

void bind_collectives(pybind11::module_& module) {
  module.def("algorithm_names", &algorithm_names, "Names that Options(algorithm=...) takes.");
}

}  // namespace pycoll::bindings
