// The sweeps of the roofline: every instruction set and kind of store gives the same sums, and nothing else is written.
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "kernels/cpu/roofline.h"

using namespace pycoll;
using namespace pycoll::cpu;

namespace {

constexpr size_t kRegion = 4096 + 64;

// Small integers, so that sums are exact; they differ by region and position.
std::vector<float> filled(size_t num_regions) {
  std::vector<float> memory(num_regions * kRegion / sizeof(float));
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>((i * 7) % 1009);
  return memory;
}

struct Aligned {
  explicit Aligned(const std::vector<float>& content)
      : numel(content.size()), storage(content.size() * sizeof(float) + 64) {
    base = storage.data() + (64 - reinterpret_cast<uintptr_t>(storage.data()) % 64) % 64;
    std::memcpy(base, content.data(), numel * sizeof(float));
  }
  float at(size_t i) const {
    float value;
    std::memcpy(&value, base + i * sizeof(float), sizeof(value));
    return value;
  }
  size_t numel;
  std::vector<std::byte> storage;
  std::byte* base;
};

Transfer transfer_of(size_t n, size_t m, size_t nbytes, bool in_place) {
  Transfer transfer;
  transfer.nbytes = nbytes;
  for (size_t s = 0; s < n; ++s) transfer.sources.push_back(s * kRegion);
  for (size_t d = 0; d < m; ++d) {
    transfer.destinations.push_back((in_place ? d : n + d) * kRegion);
  }
  return transfer;
}

void check_sweep(const InstructionSet& set, Store store, size_t n, size_t m, size_t nbytes,
                 bool in_place) {
  const std::vector<float> before = filled(n + m);
  Aligned memory(before);
  const Transfer transfer = transfer_of(n, m, nbytes, in_place);
  set.sweep(memory.base, transfer, store);
  std::vector<float> expected = before;
  const size_t numel = nbytes / sizeof(float), per_region = kRegion / sizeof(float);
  for (const size_t destination : transfer.destinations) {
    for (size_t i = 0; i < numel; ++i) {
      float sum = 0;
      for (size_t s = 0; s < n; ++s) sum += before[s * per_region + i];
      expected[destination / sizeof(float) + i] = sum;
    }
    std::memcpy(reinterpret_cast<std::byte*>(expected.data()) + destination + numel * sizeof(float),
                before.data() + numel, nbytes % sizeof(float));
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    const float found = memory.at(i);
    CHECK(std::memcmp(&found, &expected[i], sizeof(found)) == 0,
          "%s store %d, %zu to %zu, %zu bytes, element %zu: %g, not %g", set.name,
          static_cast<int>(store), n, m, nbytes, i, static_cast<double>(found),
          static_cast<double>(expected[i]));
  }
}

}  // namespace

TEST(every_sweep_gives_the_sums_and_writes_nothing_else) {
  for (const InstructionSet& set : roofline_instruction_sets()) {
    for (const Store store : {Store::kOrdinary, Store::kNonTemporal}) {
      for (const size_t nbytes : {0, 3, 4, 60, 64, 252, 1021, 4093}) {
        check_sweep(set, store, 1, 1, nbytes, false);
        check_sweep(set, store, 2, 1, nbytes, false);
        check_sweep(set, store, 2, 2, nbytes, true);
        check_sweep(set, store, 3, 3, nbytes, true);
        check_sweep(set, store, 5, 1, nbytes, false);
        check_sweep(set, store, 1, 3, nbytes, false);
      }
    }
  }
}

TEST(all_ranks_run_and_are_timed) {
  RooflineArgs args;
  args.mapping_nbytes = 3 * kRegion;
  args.repetitions = 1;
  args.repetition_seconds = 0;
  for (size_t rank = 0; rank < 3; ++rank) {
    // From the rank before, to where no other rank reads.
    args.transfers.push_back({Transfer{{(rank + 2) % 3 * kRegion}, {rank * kRegion + 2048}, 1024}});
    args.owned.push_back({{rank * kRegion, kRegion}});
  }
  const Roofline roofline = measure_roofline(args);
  CHECK(roofline.seconds > 0);
}

TEST(what_lies_outside_is_refused) {
  const auto refused = [](const RooflineArgs& args, const char* text) {
    try {
      measure_roofline(args);
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kInvalidArgument && contains(error.what(), text);
    }
    return false;
  };
  RooflineArgs args;
  CHECK(refused(args, "no rank"));
  args.mapping_nbytes = 2 * kRegion;
  args.transfers = {{}};
  CHECK(refused(args, "owned has 0 ranks and transfers 1"));
  args.owned = {{{64, 2 * kRegion}}};
  CHECK(refused(args, "an owned range of 8320 bytes at 64 ends outside the mapping"));
  args.owned = {{}};
  args.transfers = {{transfer_of(1, 1, kRegion + 1, false)}};
  CHECK(refused(args, "ends outside the mapping of 8320 bytes"));
  args.transfers = {{Transfer{{4}, {64}, 8}}};
  CHECK(refused(args, "offset 4 is no multiple of 64"));
  args.transfers = {{Transfer{{}, {64}, 8}}};
  CHECK(refused(args, "give 1 to 256"));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
