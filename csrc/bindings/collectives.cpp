#include <pybind11/stl.h>

#include "base/env.h"
#include "bindings/bindings.h"
#include "collectives/selector.h"
#include "kernels/cpu/tile_kernels.h"
#include "sync/cores.h"

namespace pycoll::bindings {

void bind_collectives(pybind11::module_& module) {
  module.def(
      "environment",
      [] {
        std::vector<std::tuple<std::string, std::string, bool, std::string>> rows;
        for (const EnvVariable& v : kEnvVariables) {
          rows.emplace_back(v.name, v.default_value, v.agreed, v.meaning);
        }
        return rows;
      },
      "Every variable: name, default, whether ranks must agree, meaning.");
  module.def("instruction_set", [] { return std::string(cpu::tile_kernels().instruction_set); });
  module.def("usable_cores", &usable_cores);
  module.def("algorithm_names", &algorithm_names, "Names that Options(algorithm=...) takes.");
}

}  // namespace pycoll::bindings
