// The signal protocols: many seeds under strong and weak memory (and, in that build, ThreadSanitizer), blocks that do not all fit,
// torn lines, epochs that wrap around, ranks that are processes.
//
// PYCOLL_SIM_SEEDS and PYCOLL_SIM_MEMORY (strong, weak) choose for the tests that go through seeds.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"
#include "collective_case.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/peer_access.cuh"
#include "sanitizers.h"
#include "sim_group.h"
#include "test_data.h"

namespace pycoll::sim {
namespace {

using cuda::Protocol;

int num_seeds() {
  const char* const value = std::getenv("PYCOLL_SIM_SEEDS");
  return value != nullptr ? std::atoi(value) : kThreadSanitizer ? 3 : 12;
}

// Small enough to meet every corner: more segments than slots, in several blocks, called several times.
CollectiveCase stress(Kernel kernel, Protocol protocol) {
  CollectiveCase what;
  what.kernel = kernel;
  what.protocol = protocol;
  what.world_size = 3;
  what.num_blocks = 2;
  what.num_calls = 3;
  what.threads_per_block = 32;
  // Segments of 2 or 15 units: of float32, two blocks go through them about eight times.
  what.slot_units = protocol == Protocol::kLL128 ? 15 : 2;
  what.numel = protocol == Protocol::kLL128 ? 997 : 331;
  if (kernel == Kernel::kAllReduceOneShot) what.numel = 397;
  return what;
}

bool is_left_out(Memory memory) {
  if (memory == Memory::kWeak && kThreadSanitizer) return true;
  const char* const value = std::getenv("PYCOLL_SIM_MEMORY");
  return value != nullptr && (std::string(value) == "weak") != (memory == Memory::kWeak);
}

void run_seeds(CollectiveCase what, Options options) {
  for (int seed = 1; seed <= num_seeds(); ++seed) {
    options.seed = static_cast<uint64_t>(seed);
    for (const Memory memory : {Memory::kStrong, Memory::kWeak}) {
      if (is_left_out(memory)) continue;
      options.memory = memory;
      // Credits of a ring matter with more ranks than slots only: otherwise what has gone around says the same.
      what.world_size = is_ring(what.kernel) && seed % 3 == 2 ? cuda::kRingSlots + 2 : 2 + seed % 3;
      what.dtype = seed % 4 == 0 && !what.wire.is_quantised() ? DType::kBFloat16 : DType::kFloat32;
      if (kThreadSanitizer) what.num_calls = 2;  // each of its fibers takes a millisecond
      if (reduces(what.kernel)) what.op = seed % 4 == 1 ? ReduceOp::kMin : ReduceOp::kSum;
      options.preempt_percent = seed % 3 == 0 ? 50 : 10;
      const std::string complaint = run_case(what, options);
      CHECK(complaint.empty(), "seed %d, %s memory: %s", seed,
            memory == Memory::kWeak ? "weak" : "strong", complaint.c_str());
      if (!complaint.empty()) return;
    }
  }
}

// A block and its scale fill a slot.
CollectiveCase quantised(CollectiveCase what) {
  what.wire = {DType::kInt8, 64};
  what.slot_units = 5;
  what.numel = 1531;
  return what;
}

#define STRESS(test_name, kernel, protocol) \
  TEST(test_name) { run_seeds(stress(kernel, protocol), {}); }

STRESS(one_shot, Kernel::kAllReduceOneShot, Protocol::kSimple)
STRESS(two_shot, Kernel::kAllReduceTwoShot, Protocol::kSimple)
STRESS(reduce_scatter_direct, Kernel::kReduceScatterDirect, Protocol::kSimple)
STRESS(all_gather_direct, Kernel::kAllGatherDirect, Protocol::kSimple)
STRESS(all_to_all_direct, Kernel::kAllToAll, Protocol::kSimple)
STRESS(broadcast_direct, Kernel::kBroadcast, Protocol::kSimple)
STRESS(all_reduce_ring_simple, Kernel::kAllReduceRing, Protocol::kSimple)
STRESS(all_reduce_ring_ll128, Kernel::kAllReduceRing, Protocol::kLL128)
STRESS(reduce_scatter_ring_simple, Kernel::kReduceScatterRing, Protocol::kSimple)
STRESS(reduce_scatter_ring_ll128, Kernel::kReduceScatterRing, Protocol::kLL128)
STRESS(all_gather_ring_simple, Kernel::kAllGatherRing, Protocol::kSimple)
STRESS(all_gather_ring_ll128, Kernel::kAllGatherRing, Protocol::kLL128)

#define STRESS_QUANTISED(test_name, kernel) \
  TEST(test_name) { run_seeds(quantised(stress(kernel, Protocol::kSimple)), {}); }

STRESS_QUANTISED(quantised_one_shot, Kernel::kAllReduceOneShot)
STRESS_QUANTISED(quantised_two_shot, Kernel::kAllReduceTwoShot)
STRESS_QUANTISED(quantised_reduce_scatter, Kernel::kReduceScatterDirect)
STRESS_QUANTISED(quantised_all_gather, Kernel::kAllGatherDirect)

// What integers lose when they wrap on the way is no part of a sum, but it is of an average, which travels wide.
TEST(integers_on_a_ring) {
  if (kThreadSanitizer) return;  // to it they are like floats
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMax}) {
    CollectiveCase what = stress(Kernel::kAllReduceRing, Protocol::kSimple);
    what.dtype = DType::kInt8;
    what.op = op;
    what.world_size = 5;
    const std::string complaint = run_case(what, {});
    CHECK(complaint.empty(), "%s", complaint.c_str());
  }
}

// Only averages of integers send more than the elements have.
TEST(integers_travel_as_they_are) {
  const auto accesses = [](ReduceOp op) {
    constexpr size_t kNumel = 4096;
    SimGroup group({.world_size = 2, .slot_units = 64}, {});
    std::vector<std::unique_ptr<Tensor>> tensors;
    for (int rank = 0; rank < 2; ++rank) {
      tensors.push_back(std::make_unique<Tensor>(group, kNumel, 0));
      cuda::AllReduceRingArgs args;
      args.group = group.group(rank);
      args.input = args.output = tensors.back()->data();
      args.numel = kNumel;
      args.reduction = {DType::kInt8, op, 2, 1.0};
      args.staging = group.ring(rank);
      cuda::launch_all_reduce_ring(args, group.config(), group.simulation.stream(rank));
    }
    return group.simulation.run().accesses;
  };
  const uint64_t of_sum = accesses(ReduceOp::kSum), of_average = accesses(ReduceOp::kAvg);
  // A unit: read, sent, received, read, written, sent, received, written; of averages sent and received in four vectors first.
  CHECK(of_sum < 2 * 8 * 128 + 1000, "%lu accesses", static_cast<unsigned long>(of_sum));
  CHECK(of_average >= of_sum + 2 * 6 * 128, "%lu accesses, not much more than %lu",
        static_cast<unsigned long>(of_average), static_cast<unsigned long>(of_sum));
}

// ---- corners of packets and lines

// Calls of many sizes, one after another on the same memory, so that what is left of one lies where the next one looks.
template <class Args, class Launch>
void check_sizes(Launch launch, Protocol protocol, size_t slot_units) {
  constexpr int kRanks = 3;
  constexpr size_t kNumels[] = {397, 0, 5, 4 * 14, 4 * 15, 4 * 15 + 1, 1, 4 * 29 + 3, 397, 2};
  for (uint64_t seed = 1; seed <= (kThreadSanitizer ? 1 : 3); ++seed) {
    for (const Memory memory : {Memory::kStrong, Memory::kWeak}) {
      if (is_left_out(memory)) continue;
      SimGroup group({.world_size = kRanks,
                      .threads_per_block = 32,
                      .slot_units = slot_units,
                      .protocol = protocol},
                     {.seed = seed, .preempt_percent = 30, .memory = memory});
      std::vector<std::unique_ptr<Tensor>> tensors;
      std::vector<Bytes> expected;
      for (int call = 0; call < static_cast<int>(std::size(kNumels)); ++call) {
        const size_t numel = kNumels[call];
        Bytes sums(numel * 4);
        for (size_t i = 0; i < numel; ++i) {
          const auto sum = static_cast<float>(kRanks * (i + 1000 * static_cast<size_t>(call)) + 3);
          std::memcpy(sums.data() + 4 * i, &sum, 4);
        }
        for (int rank = 0; rank < kRanks; ++rank) {
          tensors.push_back(std::make_unique<Tensor>(group, numel * 4, 0));
          expected.push_back(sums);
          for (size_t i = 0; i < numel; ++i) {
            const auto x = static_cast<float>(i + 1000 * static_cast<size_t>(call) +
                                              static_cast<size_t>(rank));
            std::memcpy(tensors.back()->data() + 4 * i, &x, 4);
          }
          Args args;
          args.group = group.group(rank, requires { args.mailboxes; });
          args.input = args.output = tensors.back()->data();
          args.numel = numel;
          if constexpr (requires { args.mailboxes; }) {
            args.mailboxes = group.mailboxes();
            args.capacity_units = group.sizes.capacity_units;
          } else {
            args.protocol = protocol;
            args.staging = group.ring(rank);
          }
          launch(args, group.config(), group.simulation.stream(rank));
        }
      }
      const Report report = group.simulation.run();
      CHECK(report.done(), "%s", report.text.c_str());
      for (size_t i = 0; i < tensors.size(); ++i) {
        const long different = first_difference(DType::kFloat32, tensors[i]->copy(), expected[i]);
        CHECK(different < 0 && tensors[i]->guards_are_intact(), "call %zu, element %ld", i / kRanks,
              different);
      }
    }
  }
}

TEST(packets_of_calls_of_many_sizes) {
  check_sizes<cuda::AllReduceOneShotArgs>(cuda::launch_all_reduce_one_shot, Protocol::kSimple, 8);
}

// Segments that end before, in and after the unit that is split between two lines of a pair.
TEST(lines_of_calls_of_many_sizes) {
  for (const size_t slot_units : {15, 1, 14, 16}) {
    if (kThreadSanitizer && slot_units != 15) continue;
    check_sizes<cuda::AllReduceRingArgs>(cuda::launch_all_reduce_ring, Protocol::kLL128,
                                         slot_units);
  }
}

// ---- conditions

// Of the element types that few launchers have.
TEST(misaligned_alike) {
  if (kThreadSanitizer) return;  // to it this is the same
  for (const Kernel kernel :
       {Kernel::kAllReduceOneShot, Kernel::kAllReduceTwoShot, Kernel::kAllReduceRing,
        Kernel::kReduceScatterDirect, Kernel::kReduceScatterRing, Kernel::kAllGatherRing}) {
    for (const size_t shift : {1, 2, 3}) {
      CollectiveCase what = stress(kernel, Protocol::kSimple);
      what.dtype = shift == 2 ? DType::kBFloat16 : DType::kFloat32;
      what.shift = shift;
      what.tells_lead = true;
      what.num_calls = 2;
      const std::string complaint = run_case(what, {});
      CHECK(complaint.empty(), "%s", complaint.c_str());
    }
  }
}

const Kernel kAllKernels[] = {
    Kernel::kAllReduceOneShot,    Kernel::kAllReduceTwoShot,  Kernel::kAllReduceRing,
    Kernel::kReduceScatterDirect, Kernel::kReduceScatterRing, Kernel::kAllGatherDirect,
    Kernel::kAllGatherRing,       Kernel::kAllToAll,          Kernel::kBroadcast};

TEST(blocks_need_not_all_fit) {
  for (const Kernel kernel : kAllKernels) {
    CollectiveCase what = stress(kernel, Protocol::kSimple);
    what.num_blocks = 3;
    // One block at a time on each device, and one of each rank on a device that ranks share.
    for (const bool one_device : {false, true}) {
      const int resident = one_device ? what.world_size * 3 : 1;
      const std::string complaint =
          run_case(what, {.resident_blocks = resident, .one_device = one_device});
      CHECK(complaint.empty(), "%s", complaint.c_str());
    }
  }
}

TEST(epochs_wrap_around) {
  if (kThreadSanitizer) return;  // what happens beside it is seen by the others
  // The last: packets of one-shot are swept before a flag comes again, in epochs 2^30 - 2 and 2^30 - 1.
  for (const uint32_t first : {0xfffffffdu, 0x7ffffffdu, (1u << 30) - 4}) {
    for (const Kernel kernel : kAllKernels) {
      for (const Protocol protocol : {Protocol::kSimple, Protocol::kLL128}) {
        CollectiveCase what = stress(kernel, protocol);
        what.num_calls = 4;
        what.first_epoch = first;
        const std::string complaint = run_case(what, {});
        CHECK(complaint.empty(), "%s", complaint.c_str());
      }
    }
  }
}

TEST(torn_lines_break_ll128_and_nothing_else) {
  if (kThreadSanitizer) return;
  int wrong = 0;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const Options torn{.seed = seed, .preempt_percent = 50, .tear_lines = true};
    CollectiveCase what = stress(Kernel::kAllReduceRing, Protocol::kLL128);
    wrong += !run_case(what, torn).empty();
    for (const Kernel kernel : {Kernel::kAllReduceOneShot, Kernel::kAllReduceTwoShot}) {
      const std::string complaint = run_case(stress(kernel, Protocol::kSimple), torn);
      CHECK(complaint.empty(), "%s", complaint.c_str());
    }
  }
  CHECK(wrong > 0, "%s", "torn lines were not noticed");
}

// Kernels of all kinds, one after another on the same memory.
TEST(kinds_share_memory) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    for (const Memory memory : {Memory::kStrong, Memory::kWeak}) {
      if (kThreadSanitizer && memory == Memory::kWeak) continue;
      SimGroup group({.world_size = 3, .slot_units = 2}, {.seed = seed, .memory = memory});
      constexpr size_t kNumel = 101;
      std::vector<std::unique_ptr<Tensor>> tensors;
      Bytes expected(kNumel * 4);
      for (int rank = 0; rank < 3; ++rank) {
        tensors.push_back(std::make_unique<Tensor>(group, kNumel * 4, 0));
        for (size_t i = 0; i < kNumel; ++i) {
          const auto x = static_cast<float>(i % 13 + static_cast<size_t>(rank));
          std::memcpy(tensors.back()->data() + 4 * i, &x, 4);
          const auto sum = static_cast<float>(9 * (3 * (i % 13) + 3));
          std::memcpy(expected.data() + 4 * i, &sum, 4);
        }
      }
      // Three sums in place, so every result is 9 times the first sum; barriers and a broadcast change nothing.
      for (int round = 0; round < 4; ++round) {
        for (int rank = 0; rank < 3; ++rank) {
          void* const data = tensors[static_cast<size_t>(rank)]->data();
          void* const stream = group.simulation.stream(rank);
          cuda::launch_barrier({group.group(rank)}, {1, 32}, stream);
          if (round == 3) {
            cuda::ExchangeDirectArgs args;
            args.group = group.group(rank);
            args.staging = group.direct();
            cuda::fill_broadcast(args, data, data, kNumel * 4, 1);
            cuda::launch_exchange_direct(args, group.config(), stream);
          } else if (round == 1) {
            cuda::AllReduceRingArgs args;
            args.group = group.group(rank);
            args.input = args.output = data;
            args.numel = kNumel;
            args.staging = group.ring(rank);
            cuda::launch_all_reduce_ring(args, group.config(), stream);
          } else {
            cuda::AllReduceTwoShotArgs args;
            args.group = group.group(rank);
            args.input = args.output = data;
            args.numel = kNumel;
            args.staging = group.direct();
            cuda::launch_all_reduce_two_shot(args, group.config(), stream);
          }
        }
      }
      const Report report = group.simulation.run();
      CHECK(report.done(), "%s", report.text.c_str());
      for (const auto& tensor : tensors) {
        const long different = first_difference(DType::kFloat32, tensor->copy(), expected);
        CHECK(different < 0 && tensor->guards_are_intact(), "element %ld", different);
      }
    }
  }
}

// ---- ranks that are processes: each has a scheduler of its own, and real concurrency comes to the simulated one

// Three sums in place, by rank `rank`; false if a result is wrong.
bool sum_as_process(SimGroup& group, int rank, bool ring) {
  constexpr size_t kNumel = 501;
  const auto world_size = static_cast<size_t>(group.sizes.world_size);
  Tensor tensor(group, kNumel * 4, 0);
  Bytes expected(kNumel * 4);
  for (size_t i = 0; i < kNumel; ++i) {
    const auto x = static_cast<float>(i % 17 + static_cast<size_t>(rank));
    std::memcpy(tensor.data() + 4 * i, &x, 4);
    const size_t first = world_size * (i % 17) + world_size * (world_size - 1) / 2;
    const auto sum = static_cast<float>(first * world_size * world_size);
    std::memcpy(expected.data() + 4 * i, &sum, 4);
  }
  void* const stream = group.simulation.stream(rank);
  for (int call = 0; call < 3; ++call) {
    if (ring) {
      cuda::AllReduceRingArgs args;
      args.group = group.group(rank);
      args.protocol = Protocol::kLL128;
      args.input = args.output = tensor.data();
      args.numel = kNumel;
      args.staging = group.ring(rank);
      cuda::launch_all_reduce_ring(args, group.config(), stream);
    } else {
      cuda::AllReduceTwoShotArgs args;
      args.group = group.group(rank);
      args.input = args.output = tensor.data();
      args.numel = kNumel;
      args.staging = group.direct();
      cuda::launch_all_reduce_two_shot(args, group.config(), stream);
    }
  }
  const Report report = group.simulation.run();
  return report.done() && first_difference(DType::kFloat32, tensor.copy(), expected) < 0;
}

TEST(ranks_can_be_processes) {
  if (kThreadSanitizer) return;  // it does not look across processes
  constexpr int kRanks = 3;
  for (const bool ring : {false, true}) {
    SimGroup group({.world_size = kRanks, .slot_units = 16, .protocol = Protocol::kLL128},
                   {.alone = false});
    std::vector<pid_t> children;
    for (int rank = 0; rank < kRanks; ++rank) {
      const pid_t child = fork();
      if (child == 0) _exit(sum_as_process(group, rank, ring) ? 0 : 1);
      children.push_back(child);
    }
    for (const pid_t child : children) {
      int status = -1;
      waitpid(child, &status, 0);
      CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d, ring %d", status, ring);
    }
  }
}

// What was written before a barrier is seen after it.
struct WriteKernel {
  struct Args {
    uint32_t* word = nullptr;
    uint32_t value = 0;
  };
  static constexpr int kMaxThreads = 32;
  static void run(const Args& args) {
    if (threadIdx.x == 0) cuda::peer::store_plain(args.word, args.value);
  }
};
struct ReadKernel {
  struct Args {
    const uint32_t* word = nullptr;
    uint32_t expected = 0;
  };
  static constexpr int kMaxThreads = 32;
  static void run(const Args& args) {
    const uint32_t seen = cuda::peer::load_plain(args.word);
    CHECK(seen == args.expected, "%u instead of %u", seen, args.expected);
  }
};

// Ranks 0 to kRanks - 1, of which `absent` takes no part and is in nobody's table.
void check_barrier(int absent) {
  constexpr int kRanks = 5;
  for (uint64_t seed = 1; seed <= (kThreadSanitizer ? 3 : 10); ++seed) {
    for (const Memory memory : {Memory::kStrong, Memory::kWeak}) {
      if (kThreadSanitizer && memory == Memory::kWeak) continue;
      SimGroup group({.world_size = kRanks}, {.seed = seed, .memory = memory});
      const DeviceMemory words(group.simulation, kRanks * 64);
      for (uint32_t round = 1; round <= 3; ++round) {
        for (int rank = 0; rank < kRanks; ++rank) {
          if (rank == absent) continue;
          void* const stream = group.simulation.stream(rank);
          cuda::BarrierArgs args{group.group(rank)};
          if (absent >= 0) args.group.control.of_rank[absent] = nullptr;
          int next = (rank + 1) % kRanks;
          if (next == absent) next = (next + 1) % kRanks;
          cuda::launch<WriteKernel>({words.as<uint32_t>() + 16 * rank, round}, {1, 32}, stream);
          cuda::launch_barrier(args, {1, 32}, stream);
          cuda::launch<ReadKernel>({words.as<uint32_t>() + 16 * next, round}, {1, 32}, stream);
          cuda::launch_barrier(args, {1, 32}, stream);
        }
      }
      const Report report = group.simulation.run();
      CHECK(report.done(), "%s", report.text.c_str());
    }
  }
}

TEST(barrier_orders_kernels) { check_barrier(-1); }
TEST(barrier_without_some_rank) {
  if (kThreadSanitizer) return;  // to it this is the same
  for (const int absent : {0, 2, 4}) check_barrier(absent);
}

}  // namespace
}  // namespace pycoll::sim

int main(int argc, char** argv) { return run_tests(argc, argv); }
