// Runs launches of translated kernels over many seeds. A case is a file of lines:
//
//   arena ADDRESS NBYTES FILE EXPECTED   memory as it is before, and as it shall be after
//   ranks N
//   buffer ADDRESS NBYTES                what kernels may touch
//   check ADDRESS NBYTES                 what must be as expected
//   launch RANK KERNEL BLOCKS PARAMETERS (hexadecimal)
//
// The arena is mapped where its creator had it, so that pointers in it hold. `run_case CASE FIRST_SEED LAST_SEED strong|weak`
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "kernel_table.h"
#include "simulation.h"

namespace pycoll::sim {
namespace {

struct Region {
  uint64_t address = 0;
  size_t nbytes = 0;
};

struct KernelLaunch {
  int rank = 0;
  const ptx::Kernel* kernel = nullptr;
  int num_blocks = 1;
  std::vector<std::byte> parameters;
};

struct Case {
  Region arena;
  std::string image, expected;
  int num_ranks = 1;
  std::vector<Region> buffers, checks;
  std::vector<KernelLaunch> launches;
};

[[noreturn]] void give_up(const std::string& text) {
  std::cerr << text << "\n";
  std::exit(2);
}

const ptx::Kernel* find_kernel(const std::string& name) {
  for (const ptx::Kernel& kernel : ptx::kernels())
    if (name == kernel.name) return &kernel;
  give_up("no kernel " + name);
}

std::vector<std::byte> from_hexadecimal(const std::string& text) {
  std::vector<std::byte> bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(std::stoi(text.substr(i, 2), nullptr, 16)));
  return bytes;
}

Case read_case(const char* path) {
  Case what;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string kind;
    words >> kind;
    Region region;
    if (kind == "arena") {
      words >> region.address >> region.nbytes >> what.image >> what.expected;
      what.arena = region;
    } else if (kind == "ranks") {
      words >> what.num_ranks;
    } else if (kind == "buffer" || kind == "check") {
      words >> region.address >> region.nbytes;
      (kind == "buffer" ? what.buffers : what.checks).push_back(region);
    } else if (kind == "launch") {
      KernelLaunch launch;
      std::string name, parameters;
      words >> launch.rank >> name >> launch.num_blocks >> parameters;
      launch.kernel = find_kernel(name);
      launch.parameters = from_hexadecimal(parameters);
      what.launches.push_back(std::move(launch));
    }
    if (!words) give_up("not understood: " + line);
  }
  return what;
}

const std::byte* map(const std::string& path, size_t nbytes, uint64_t address) {
  const int file = open(path.c_str(), O_RDONLY);
  void* const wanted = reinterpret_cast<void*>(address);
  const int flags = MAP_PRIVATE | (address != 0 ? MAP_FIXED : 0);
  void* const mapped = mmap(wanted, nbytes, PROT_READ | PROT_WRITE, flags, file, 0);
  close(file);
  if (mapped == MAP_FAILED || (address != 0 && mapped != wanted)) give_up("cannot map " + path);
  return static_cast<const std::byte*>(mapped);
}

// What is wrong, or nothing.
std::string run(const Case& what, const Options& options, const std::byte* expected) {
  map(what.image, what.arena.nbytes, what.arena.address);
  Simulation simulation(what.num_ranks, options);
  for (const Region& buffer : what.buffers)
    simulation.buffers().add(reinterpret_cast<void*>(buffer.address), buffer.nbytes);
  for (const KernelLaunch& launch : what.launches) {
    const auto body = [&launch] { launch.kernel->run(launch.parameters.data()); };
    simulation.stream(launch.rank)
        ->launch({launch.kernel->name, launch.num_blocks, launch.kernel->num_threads, body});
  }
  const Report report = simulation.run();
  if (!report.done()) return std::string(name(report.verdict)) + ": " + report.text;
  for (size_t i = 0; i < what.checks.size(); ++i) {
    const Region& check = what.checks[i];
    const auto* const seen = reinterpret_cast<const std::byte*>(check.address);
    const auto* const wanted = expected + (check.address - what.arena.address);
    for (size_t at = 0; at < check.nbytes; ++at)
      if (seen[at] != wanted[at])
        return "byte " + std::to_string(at) + " of check " + std::to_string(i) +
               " is wrong: " + std::to_string(std::to_integer<int>(seen[at])) + " instead of " +
               std::to_string(std::to_integer<int>(wanted[at]));
  }
  return "";
}

}  // namespace
}  // namespace pycoll::sim

int main(int argc, char** argv) {
  using namespace pycoll::sim;
  if (argc != 5) give_up("run_case CASE FIRST_SEED LAST_SEED strong|weak");
  const Case what = read_case(argv[1]);
  const std::byte* const expected = map(what.expected, what.arena.nbytes, 0);
  Options options;
  options.memory = std::strcmp(argv[4], "weak") == 0 ? Memory::kWeak : Memory::kStrong;
  int seeds = 0;
  for (int seed = std::atoi(argv[2]); seed <= std::atoi(argv[3]); ++seed, ++seeds) {
    options.seed = static_cast<uint64_t>(seed);
    if (const std::string complaint = run(what, options, expected); !complaint.empty()) {
      std::cout << "seed " << seed << ": " << complaint << "\n";
      return 1;
    }
  }
  std::cout << seeds << " seeds, " << what.checks.size() << " checks, 0 failures\n";
  return seeds > 0 && !what.checks.empty() ? 0 : 1;
}
