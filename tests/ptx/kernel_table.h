// The translated kernels of a program.
#pragma once

#include <cstddef>
#include <vector>

namespace pycoll::sim::ptx {

struct Kernel {
  const char* name;
  int num_threads;
  void (*run)(const std::byte* parameters);
};

const std::vector<Kernel>& kernels();

}  // namespace pycoll::sim::ptx
