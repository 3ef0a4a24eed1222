#include "bindings/bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The compiled part of pycoll.";
  pycoll::bindings::bind_collectives(module);
  pycoll::bindings::bind_torch(module);
  pycoll::bindings::bind_shared_memory(module);
  pycoll::bindings::bind_direct(module);
  pycoll::bindings::bind_gradient_counter(module);
}
