// All collective kernels: a sample in which every two values of two parameters meet, or, with PYCOLL_TEST_FULL=1, everything.
#include <cstdlib>
#include <set>
#include <tuple>
#include <vector>

#include "check.h"
#include "collective_case.h"
#include "random.h"
#include "sanitizers.h"

namespace pycoll::sim {
namespace {

using cuda::Protocol;

constexpr DType kDTypes[] = {DType::kFloat64,   DType::kFloat32,      DType::kFloat16,
                             DType::kBFloat16,  DType::kFloat8E4M3FN, DType::kFloat8E5M2,
                             DType::kInt8,      DType::kInt16,        DType::kInt32,
                             DType::kInt64,     DType::kUInt8,        DType::kUInt16,
                             DType::kUInt32,    DType::kUInt64,       DType::kBool,
                             DType::kComplex32, DType::kComplex64,    DType::kComplex128};
constexpr int kWorldSizes[] = {1, 2, 3, 4, 8};
constexpr size_t kNumels[] = {0, 1, 7, 31, 127, 509, 1021};
constexpr size_t kShifts[] = {0, 1, 3};
// Elements as they are, and codes.
constexpr DType kNoCodes = DType::kFloat64;
constexpr DType kCodes[] = {kNoCodes, DType::kFloat8E4M3FN, DType::kFloat8E5M2, DType::kInt8};
constexpr size_t kBlocks[] = {32, 64, 128, 256, 512};

bool is_full() {
  const char* const value = std::getenv("PYCOLL_TEST_FULL");
  return value != nullptr && std::string(value) == "1";
}

// Parameters by number, so that pairs can be told apart.
struct Choice {
  static constexpr int kNumParameters = 9;
  int value[kNumParameters];

  static constexpr int num_values(int parameter) {
    constexpr int kNums[kNumParameters] = {kNumKernels,
                                           2,
                                           std::size(kDTypes),
                                           kNumReduceOps,
                                           std::size(kWorldSizes),
                                           std::size(kNumels),
                                           std::size(kShifts),
                                           4,
                                           std::size(kCodes)};
    return kNums[parameter];
  }
  bool is_possible() const {
    const CollectiveCase what = to_case();
    if (reduces(what.kernel) ? !is_valid(what.op, what.dtype) : what.op != ReduceOp::kSum)
      return false;
    if (what.wire.is_quantised() && (!quantises(what.kernel) || !is_quantised_type(what.dtype)))
      return false;
    return is_ring(what.kernel) || what.protocol == Protocol::kSimple;
  }
  static bool is_quantised_type(DType dtype) {
    return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  }
  CollectiveCase to_case() const {
    CollectiveCase what;
    what.kernel = static_cast<Kernel>(value[0]);
    what.protocol = static_cast<Protocol>(value[1]);
    what.dtype = kDTypes[value[2]];
    what.op = static_cast<ReduceOp>(value[3]);
    what.world_size = kWorldSizes[value[4]];
    what.numel = kNumels[value[5]];
    what.shift = kShifts[value[6]];
    what.in_place = value[7] % 2 == 1;
    what.tells_lead = value[7] >= 2;
    // These follow from the others, and are as many as there are values.
    int sum = 0;
    for (const int v : value) sum += v;
    what.num_blocks = 1 + sum % 3;
    what.threads_per_block = 32 + 32 * (sum % 2);
    what.slot_units = what.numel > 500 ? 16 : 8;
    if (kCodes[value[8]] != kNoCodes) {
      what.wire = {kCodes[value[8]], kBlocks[sum % 5]};
      what.slot_units = what.wire.block_numel / 16 * (1 + static_cast<size_t>(sum) % 2) + 1;
    }
    return what;
  }
};

using Pair = std::tuple<int, int, int, int>;

std::set<Pair> pairs_of(const Choice& choice) {
  std::set<Pair> pairs;
  for (int a = 0; a < Choice::kNumParameters; ++a)
    for (int b = a + 1; b < Choice::kNumParameters; ++b)
      pairs.insert({a, choice.value[a], b, choice.value[b]});
  return pairs;
}

Choice random_choice(Random& random) {
  Choice choice;
  do {
    for (int i = 0; i < Choice::kNumParameters; ++i)
      choice.value[i] =
          static_cast<int>(random.below(static_cast<uint64_t>(Choice::num_values(i))));
  } while (!choice.is_possible());
  return choice;
}

// Greedy: of some choices the one with the most pairs that have not been seen, until there are none.
std::vector<Choice> pairwise_sample() {
  Random random(20240607);
  std::set<Pair> missing;
  for (int i = 0; i < 60000; ++i) missing.merge(pairs_of(random_choice(random)));
  std::vector<Choice> sample;
  while (!missing.empty()) {
    Choice best{};
    size_t most = 0;
    for (int i = 0; i < 200; ++i) {
      const Choice choice = random_choice(random);
      size_t new_pairs = 0;
      for (const Pair& pair : pairs_of(choice)) new_pairs += missing.count(pair);
      if (new_pairs > most) {
        most = new_pairs;
        best = choice;
      }
    }
    if (most == 0) continue;
    for (const Pair& pair : pairs_of(best)) missing.erase(pair);
    sample.push_back(best);
  }
  return sample;
}

void check_case(const Choice& choice, uint64_t seed, Memory memory) {
  const std::string complaint = run_case(choice.to_case(), {.seed = seed, .memory = memory});
  CHECK(complaint.empty(), "seed %lu: %s", static_cast<unsigned long>(seed), complaint.c_str());
}

TEST(pairwise_sample_of_everything) {
  uint64_t seed = 0;
  const std::vector<Choice> sample = pairwise_sample();
  for (const Choice& choice : sample) {
    ++seed;
    const bool is_weak = seed % 3 == 0 && !kThreadSanitizer && choice.to_case().numel < 500;
    check_case(choice, seed, is_weak ? Memory::kWeak : Memory::kStrong);
  }
  CHECK(sample.size() > 150, "%zu cases are too few to hold all pairs", sample.size());
}

// Each kernel × dtype × op × codes at every number of ranks. Sizes, alignments and places take turns.
TEST(full_matrix) {
  if (!is_full()) return;
  constexpr int kTypes = static_cast<int>(std::size(kDTypes));
  Choice choice{};
  uint64_t seed = 0;
  for (choice.value[0] = 0; choice.value[0] < kNumKernels; ++choice.value[0]) {
    for (int i = 0; i < 4 * 2 * kTypes * kNumReduceOps * 5; ++i) {
      choice.value[1] = i % 2;
      choice.value[2] = i / 2 % kTypes;
      choice.value[3] = i / (2 * kTypes) % kNumReduceOps;
      choice.value[4] = i / (2 * kTypes) / kNumReduceOps % 5;
      choice.value[8] = i / (2 * kTypes) / kNumReduceOps / 5;
      if (!choice.is_possible()) continue;
      ++seed;
      choice.value[5] = static_cast<int>(seed % std::size(kNumels));
      choice.value[6] = static_cast<int>(seed / 7 % std::size(kShifts));
      choice.value[7] = static_cast<int>(seed / 3 % 4);
      check_case(choice, seed,
                 seed % 4 == 0 && !kThreadSanitizer ? Memory::kWeak : Memory::kStrong);
    }
  }
  CHECK(seed > 2000, "%lu cases", static_cast<unsigned long>(seed));
}

// Data that all ranks have at the same distance from a multiple of 16 bytes moves in vectors, once the kernels are told.
TEST(a_lead_that_is_told_saves_accesses) {
  for (const Kernel kernel :
       {Kernel::kAllReduceOneShot, Kernel::kAllReduceTwoShot, Kernel::kAllReduceRing,
        Kernel::kReduceScatterDirect, Kernel::kReduceScatterRing, Kernel::kAllGatherRing}) {
    uint64_t accesses[2];
    for (const bool told : {false, true}) {
      CollectiveCase what{.kernel = kernel, .dtype = DType::kInt16, .numel = 1021, .shift = 3};
      what.slot_units = 64;
      what.in_place = true;
      what.tells_lead = told;
      const std::string complaint = run_case(what, {}, &accesses[told]);
      CHECK(complaint.empty(), "%s", complaint.c_str());
    }
    CHECK(accesses[1] * 10 < accesses[0] * 7, "%s: %lu accesses, and %lu before", name(kernel),
          static_cast<unsigned long>(accesses[1]), static_cast<unsigned long>(accesses[0]));
  }
}

// The order of additions is what the contract says, so every rank has the same bits and the two kernels have too.
TEST(many_seeds_give_the_same_bits) {
  for (const Kernel kernel : {Kernel::kAllReduceOneShot, Kernel::kAllReduceTwoShot}) {
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      CollectiveCase what{.kernel = kernel,
                          .dtype = DType::kBFloat16,
                          .world_size = 4,
                          .numel = 211,
                          .num_blocks = 2};
      const std::string complaint = run_case(what, {.seed = seed});
      CHECK(complaint.empty(), "seed %lu: %s", static_cast<unsigned long>(seed), complaint.c_str());
    }
  }
}

}  // namespace
}  // namespace pycoll::sim

int main(int argc, char** argv) { return run_tests(argc, argv); }
