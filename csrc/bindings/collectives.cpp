#include <pybind11/stl.h>

#include "base/env.h"
#include "bindings/bindings.h"
#include "collectives/selector.h"
#include "kernels/cpu/roofline.h"
#include "kernels/cpu/tile_kernels.h"
#include "sync/cores.h"

namespace pycoll::bindings {
namespace {

// Sources, destinations, bytes.
using PythonTransfer = std::tuple<std::vector<size_t>, std::vector<size_t>, size_t>;

std::tuple<double, std::string, std::string> roofline(
    size_t mapping_nbytes, const std::vector<std::vector<std::pair<size_t, size_t>>>& owned,
    const std::vector<std::vector<PythonTransfer>>& transfers, int repetitions,
    double repetition_seconds) {
  cpu::RooflineArgs args{mapping_nbytes, {}, {}, repetitions, repetition_seconds};
  for (const auto& of_rank : owned) {
    auto& mine = args.owned.emplace_back();
    for (const auto& [begin, nbytes] : of_rank) mine.push_back({begin, nbytes});
  }
  for (const auto& of_rank : transfers) {
    auto& mine = args.transfers.emplace_back();
    for (const auto& [sources, destinations, nbytes] : of_rank) {
      mine.push_back({sources, destinations, nbytes});
    }
  }
  const cpu::Roofline best = cpu::measure_roofline(args);
  return {best.seconds, best.store == cpu::Store::kNonTemporal ? "non-temporal" : "ordinary",
          best.instruction_set};
}

// Collective and name of each algorithm, and whether it keeps the fixed order of additions.
std::vector<std::tuple<std::string, std::string, bool>> algorithm_table() {
  std::vector<std::tuple<std::string, std::string, bool>> rows;
  for (const Algorithm* algorithm : algorithms()) {
    rows.emplace_back(name(algorithm->collective), algorithm->name, keeps_bracketing(*algorithm));
  }
  return rows;
}

}  // namespace

void bind_collectives(pybind11::module_& module) {
  namespace py = pybind11;
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
  module.def("algorithms", &algorithm_table,
             "Every algorithm: collective, name, whether it keeps the fixed order of additions.");
  module.def("roofline", &roofline, py::arg("mapping_nbytes"), py::arg("owned"),
             py::arg("transfers"), py::arg("repetitions"), py::arg("repetition_seconds"),
             py::call_guard<py::gil_scoped_release>(),
             "Seconds, kind of store and instruction set of csrc/kernels/cpu/roofline.h.");
  module.def("algorithm_names", &algorithm_names, "Names that Options(algorithm=...) takes.");
}

}  // namespace pycoll::bindings
