// How kernels end that cannot go on, and data beyond 2^32 bytes.
#include <sys/mman.h>

#include <memory>
#include <vector>

#include "check.h"
#include "kernels/cuda/edges.cuh"
#include "kernels/cuda/launch.h"
#include "reference.h"
#include "sanitizers.h"
#include "sim_group.h"
#include "test_data.h"

namespace pycoll::sim {
namespace {

using cuda::FailureKind;
using cuda::Phase;

// Rank `absent` launches nothing; the others must say whom they waited for, where.
void check_deadline(bool one_shot, Phase phase) {
  constexpr int kAbsent = 1;
  SimGroup group({.world_size = 3}, {});
  group.timeout_ns = 1'000'000'000;
  std::vector<std::unique_ptr<Tensor>> tensors;
  for (int rank = 0; rank < 3; ++rank) {
    tensors.push_back(std::make_unique<Tensor>(group, 400, 0));
    if (rank == kAbsent) continue;
    void* const data = tensors.back()->data();
    void* const stream = group.simulation.stream(rank);
    if (one_shot) {
      cuda::AllReduceOneShotArgs args;
      args.group = group.group(rank, true);
      args.input = args.output = data;
      args.numel = 100;
      args.mailboxes = group.mailboxes();
      args.capacity_units = group.sizes.capacity_units;
      cuda::launch_all_reduce_one_shot(args, group.config(), stream);
    } else {
      cuda::AllReduceTwoShotArgs args;
      args.group = group.group(rank);
      args.input = args.output = data;
      args.numel = 100;
      args.staging = group.direct();
      cuda::launch_all_reduce_two_shot(args, group.config(), stream);
    }
  }
  const Report report = group.simulation.run();
  CHECK(report.done(), "%s", report.text.c_str());
  for (const int rank : {0, 2}) {
    const cuda::FailureRecord& record = group.record(rank);
    CHECK(record.kind == static_cast<uint32_t>(FailureKind::kDeadline), "kind %u", record.kind);
    CHECK(record.phase == static_cast<uint32_t>(phase), "phase %u", record.phase);
    CHECK(record.rank == rank && record.peer == kAbsent, "%d waits for %d", record.rank,
          record.peer);
    CHECK(record.expected == 1 && record.seen == 0, "%lu %lu",
          static_cast<unsigned long>(record.expected), static_cast<unsigned long>(record.seen));
    CHECK(tensors[static_cast<size_t>(rank)]->copy() == Bytes(400, test::kGuard) ||
              tensors[static_cast<size_t>(rank)]->guards_are_intact(),
          "%s", "outputs were written");
  }
  CHECK(group.record(kAbsent).kind == 0, "%s", "who is absent reports nothing");
}

TEST(a_deadline_is_recorded_by_who_waits) {
  check_deadline(true, Phase::kOneShotHeader);
  check_deadline(false, Phase::kMeeting);
}

// A rank that comes to the meeting and then sends nothing: the wait for its data ends too.
template <class Args, class Launch>
void check_deadline_of_data(Phase phase, Launch launch,
                            cuda::Protocol protocol = cuda::Protocol::kSimple) {
  constexpr int kSilent = 1;
  SimGroup group({.world_size = 3, .protocol = protocol}, {});
  group.timeout_ns = 1'000'000'000;
  std::vector<std::unique_ptr<Tensor>> tensors;
  for (int rank = 0; rank < 3; ++rank) {
    tensors.push_back(std::make_unique<Tensor>(group, 400, 0));
    void* const stream = group.simulation.stream(rank);
    if (rank == kSilent) {
      cuda::launch_barrier({group.group(rank)}, {1, 32}, stream);
      continue;
    }
    Args args;
    args.group = group.group(rank);
    args.input = args.output = tensors.back()->data();
    args.numel = 100;
    if constexpr (requires { args.protocol; }) {
      args.protocol = protocol;
      args.staging = group.ring(rank);
    } else {
      args.staging = group.direct();
    }
    launch(args, group.config(), stream);
  }
  const Report report = group.simulation.run();
  CHECK(report.done(), "%s", report.text.c_str());
  int num_waiting_for_silent = 0;
  for (const int rank : {0, 2}) {
    const cuda::FailureRecord& record = group.record(rank);
    CHECK(record.kind == static_cast<uint32_t>(FailureKind::kDeadline), "kind %u", record.kind);
    CHECK(record.phase == static_cast<uint32_t>(phase), "phase %u", record.phase);
    // Of the ring's two, one waits for the other.
    CHECK(record.expected >> 32 == 1 && record.seen < record.expected, "%lu, not %lu",
          static_cast<unsigned long>(record.seen), static_cast<unsigned long>(record.expected));
    num_waiting_for_silent += record.peer == kSilent;
  }
  CHECK(num_waiting_for_silent > 0, "%s", "nobody names the silent rank");
}

TEST(a_deadline_ends_the_wait_for_data_too) {
  check_deadline_of_data<cuda::AllReduceTwoShotArgs>(Phase::kDirectIn,
                                                     cuda::launch_all_reduce_two_shot);
  for (const cuda::Protocol protocol : {cuda::Protocol::kSimple, cuda::Protocol::kLL128})
    check_deadline_of_data<cuda::AllReduceRingArgs>(Phase::kRingReceive,
                                                    cuda::launch_all_reduce_ring, protocol);
}

// A rank whose header comes by packets and whose data does not. On a quantised wire whole warps must leave together.
TEST(a_deadline_ends_the_wait_for_packets_too) {
  constexpr int kSilent = 1;
  for (const size_t block_numel : {size_t{0}, size_t{64}}) {
    SimGroup group({.world_size = 3}, {});
    group.timeout_ns = 1'000'000'000;
    std::vector<std::unique_ptr<Tensor>> tensors;
    for (int rank = 0; rank < 3; ++rank) {
      tensors.push_back(std::make_unique<Tensor>(group, 400, 0));
      cuda::AllReduceOneShotArgs args;
      args.group = group.group(rank, true);
      args.input = args.output = tensors.back()->data();
      args.numel = rank == kSilent ? 0 : 100;
      args.wire = {DType::kInt8, block_numel};
      args.mailboxes = group.mailboxes();
      args.capacity_units = group.sizes.capacity_units;
      cuda::launch_all_reduce_one_shot(args, group.config(), group.simulation.stream(rank));
    }
    const Report report = group.simulation.run();
    CHECK(report.done(), "%s", report.text.c_str());
    for (const int rank : {0, 2}) {
      const cuda::FailureRecord& record = group.record(rank);
      CHECK(record.kind == static_cast<uint32_t>(FailureKind::kDeadline), "kind %u", record.kind);
      CHECK(record.phase == static_cast<uint32_t>(Phase::kOneShotData), "phase %u", record.phase);
      CHECK(record.peer == kSilent && record.expected == 1 && record.seen == 0, "peer %d",
            record.peer);
    }
    CHECK(group.record(kSilent).kind == 0, "%s", "who needs nothing waits for nothing");
  }
}

TEST(an_aborted_group_returns_at_once) {
  SimGroup group({.world_size = 2}, {});
  *group.group(0).watch.abort = 1;  // by the host; rank 1 is never launched
  cuda::launch_barrier({group.group(0)}, {1, 32}, group.simulation.stream(0));
  const Report report = group.simulation.run();
  CHECK(report.done(), "%s", report.text.c_str());
  CHECK(group.epochs(0)[0] == 0 && group.record(0).kind == 0, "%s", "it did something");
}

// One-shot alone allows a rank without memory: it takes no part.
TEST(one_shot_passes_over_absent_ranks) {
  constexpr int kRanks = 4, kAbsent = 2;
  constexpr size_t kNumel = 53;
  SimGroup group({.world_size = kRanks}, {.seed = 11});
  std::vector<std::unique_ptr<Tensor>> tensors;
  for (int rank = 0; rank < kRanks; ++rank) {
    tensors.push_back(std::make_unique<Tensor>(group, kNumel * 4, 0));
    for (size_t i = 0; i < kNumel; ++i) {
      const auto x = static_cast<float>(i * 10 + static_cast<size_t>(rank));
      std::memcpy(tensors.back()->data() + 4 * i, &x, 4);
    }
    if (rank == kAbsent) continue;
    cuda::AllReduceOneShotArgs args;
    args.group = group.group(rank, true);
    args.input = args.output = tensors.back()->data();
    args.numel = kNumel;
    args.mailboxes = group.mailboxes();
    args.mailboxes.of_rank[kAbsent] = nullptr;
    args.capacity_units = group.sizes.capacity_units;
    cuda::launch_all_reduce_one_shot(args, group.config(), group.simulation.stream(rank));
  }
  const Report report = group.simulation.run();
  CHECK(report.done(), "%s", report.text.c_str());
  for (const int rank : {0, 1, 3}) {
    for (size_t i = 0; i < kNumel; ++i) {
      float x;
      std::memcpy(&x, tensors[static_cast<size_t>(rank)]->data() + 4 * i, 4);
      CHECK(x == static_cast<float>(30 * i + 4), "element %zu is %f", i, static_cast<double>(x));
    }
  }
}

TEST(who_comes_late_does_not_fail_the_others) {
  SimGroup group({.world_size = 2}, {.seed = 3});
  group.timeout_ns = 1'000'000'000'000;
  for (int rank = 0; rank < 2; ++rank)
    for (int i = 0; i < 20; ++i)
      cuda::launch_barrier({group.group(rank)}, {1, 32}, group.simulation.stream(rank));
  CHECK(group.simulation.run().done(), "%s", "barriers");
  CHECK(group.record(0).kind == 0 && group.record(1).kind == 0, "%s", "a failure was recorded");
}

// Ranks that call different things find it out before anything is written.
void check_mismatch(bool one_shot, uint64_t seed) {
  SimGroup group({.world_size = 3}, {.seed = seed});
  const Bytes before = make_data(DType::kFloat32, 50, 9, 9);
  std::vector<std::unique_ptr<Tensor>> tensors;
  const auto set = [&](auto& args, int rank) {
    args.group = group.group(rank, one_shot);
    if (rank == 2) args.group.fingerprint = 77;
    args.input = args.output = tensors.back()->data();
    args.numel = 50;
  };
  for (int rank = 0; rank < 3; ++rank) {
    tensors.push_back(std::make_unique<Tensor>(group, before.size(), 0));
    tensors.back()->assign(before);
    void* const stream = group.simulation.stream(rank);
    if (one_shot) {
      cuda::AllReduceOneShotArgs args;
      set(args, rank);
      args.mailboxes = group.mailboxes();
      args.capacity_units = group.sizes.capacity_units;
      cuda::launch_all_reduce_one_shot(args, group.config(), stream);
    } else {
      cuda::AllReduceTwoShotArgs args;
      set(args, rank);
      args.staging = group.direct();
      cuda::launch_all_reduce_two_shot(args, group.config(), stream);
    }
    // What comes after it must not hang.
    cuda::launch_barrier({group.group(rank)}, {1, 32}, stream);
  }
  const Report report = group.simulation.run();
  CHECK(report.done(), "%s", report.text.c_str());
  for (int rank = 0; rank < 3; ++rank) {
    const cuda::FailureRecord& record = group.record(rank);
    CHECK(record.kind == static_cast<uint32_t>(FailureKind::kMismatch), "kind %u", record.kind);
    CHECK(rank == 2 || (record.peer == 2 && record.seen == 77), "rank %d: peer %d", rank,
          record.peer);
    CHECK(rank != 2 || record.expected == 77, "rank %d", rank);
    CHECK(tensors[static_cast<size_t>(rank)]->copy() == before, "rank %d was written", rank);
  }
}

TEST(a_mismatch_is_recorded_and_nothing_written) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    check_mismatch(false, seed);
    check_mismatch(true, seed);
  }
}

TEST(uneven_exchanges_must_agree_on_their_sizes) {
  SimGroup group({.world_size = 2}, {});
  std::vector<std::unique_ptr<Tensor>> in, out;
  for (int rank = 0; rank < 2; ++rank) {
    in.push_back(std::make_unique<Tensor>(group, 64, 0));
    out.push_back(std::make_unique<Tensor>(group, 64, 0));
    cuda::ExchangeDirectArgs args;
    args.group = group.group(rank);
    args.staging = group.direct();
    for (int peer = 0; peer < 2; ++peer) {
      args.send[peer] = in.back()->data();
      args.send_bytes[peer] = rank == 1 ? 32 : 16;
      args.receive[peer] = out.back()->data() + 16 * peer;
      args.receive_bytes[peer] = peer == rank && rank == 1 ? 32 : 16;
    }
    cuda::launch_exchange_direct(args, group.config(), group.simulation.stream(rank));
  }
  const Report report = group.simulation.run();
  CHECK(report.done() || report.verdict == Verdict::kDeadlock, "%s", report.text.c_str());
  const cuda::FailureRecord& record = group.record(0);
  CHECK(record.kind == static_cast<uint32_t>(FailureKind::kMismatch), "kind %u", record.kind);
  CHECK(record.expected == 16 && record.seen == 32, "%lu %lu",
        static_cast<unsigned long>(record.expected), static_cast<unsigned long>(record.seen));
}

// ---- more than 2^31 elements

// Elements around `first` of a buffer too large to be touched in full.
struct FarKernel {
  struct Args {
    std::byte* data = nullptr;
    size_t numel = 0;
    size_t first_unit = 0;
  };
  static constexpr int kMaxThreads = 32;
  static void run(const Args& args) {
    const size_t unit = args.first_unit + threadIdx.x;
    const auto output = cuda::output_units<cuda::BFloat16>(args.data, args.numel, 0);
    if (unit < ceil_div(args.numel * 2, 16))
      output.store(unit, {{uint32_t(unit), uint32_t(unit >> 32), 3, 4}});
  }
};

TEST(units_lie_beyond_32_bits) {
  if (kThreadSanitizer) return;                // its shadow would be touched
  const size_t numel = (size_t{1} << 33) + 3;  // 16 GiB, of which a page is used
  const size_t nbytes = numel * 2;
  void* const mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(mapped != MAP_FAILED, "%s", "no address space");
  if (mapped == MAP_FAILED) return;
  Simulation simulation(1, {});
  simulation.buffers().add(mapped, nbytes);
  const size_t last = numel * 2 / 16;
  cuda::launch<FarKernel>({static_cast<std::byte*>(mapped), numel, last - 20}, {1, 32},
                          simulation.stream(0));
  const Report report = simulation.run();
  CHECK(report.done(), "%s", report.text.c_str());
  for (size_t unit = last - 20; unit <= last; ++unit) {
    uint32_t low;
    std::memcpy(&low, static_cast<std::byte*>(mapped) + unit * 16, 4);
    CHECK(low == static_cast<uint32_t>(unit), "unit %zu holds %u", unit, low);
  }
  munmap(mapped, nbytes);
}

// Chunks that begin far behind one another.
TEST(chunks_lie_beyond_32_bits) {
  if (kThreadSanitizer) return;
  const size_t far = (size_t{1} << 32) + 64;  // elements
  constexpr size_t kNumel = 77;
  SimGroup group({.world_size = 2}, {});
  std::vector<std::byte*> inputs;
  std::vector<std::unique_ptr<Tensor>> outputs;
  const size_t nbytes = (far + kNumel) * 4;
  for (int rank = 0; rank < 2; ++rank) {
    inputs.push_back(
        static_cast<std::byte*>(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)));
    group.simulation.buffers().add(inputs.back(), nbytes);
    outputs.push_back(std::make_unique<Tensor>(group, kNumel * 4, 0));
    for (size_t i = 0; i < kNumel; ++i) {
      for (const size_t begin : {size_t{0}, far}) {
        const float x = static_cast<float>(i) + (begin > 0 ? 1000.0f : 0.0f) * (rank + 1.0f);
        std::memcpy(inputs.back() + (begin + i) * 4, &x, 4);
      }
    }
    cuda::ReduceScatterDirectArgs args;
    args.group = group.group(rank);
    args.input = inputs.back();
    args.output = outputs.back()->data();
    args.chunks.begin[1] = far;
    args.chunks.numel[0] = args.chunks.numel[1] = kNumel;
    args.staging = group.direct();
    cuda::launch_reduce_scatter_direct(args, group.config(), group.simulation.stream(rank));
  }
  const Report report = group.simulation.run();
  CHECK(report.done(), "%s", report.text.c_str());
  for (int rank = 0; rank < 2; ++rank) {
    for (size_t i = 0; i < kNumel; ++i) {
      float x;
      std::memcpy(&x, outputs[static_cast<size_t>(rank)]->data() + 4 * i, 4);
      const float expected = 2.0f * static_cast<float>(i) + (rank == 1 ? 3000.0f : 0.0f);
      CHECK(x == expected, "rank %d element %zu: %f", rank, i, static_cast<double>(x));
    }
    munmap(inputs[static_cast<size_t>(rank)], nbytes);
  }
}

}  // namespace
}  // namespace pycoll::sim

int main(int argc, char** argv) { return run_tests(argc, argv); }
