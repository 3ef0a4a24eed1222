// The simulator itself: small kernels, right and wrong, and what it says of them.
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/peer_access.cuh"
#include "simulation.h"

namespace pycoll::sim {
namespace {

using cuda::LaunchConfig;
using cuda::Vector16;
namespace peer = cuda::peer;

constexpr int kSeeds = 40;

// Weak memory has its own race detector, and runs that fail leave their fibers unfinished: ThreadSanitizer's build leaves both out.

// Memory that two ranks share: data in the first lines, signals in the last.
struct alignas(128) Board {
  Vector16 data[64] = {};
  uint32_t signal[32] = {};
};

struct Args {
  Board* board = nullptr;
  int rank = 0;
  int variant = 0;
};

template <class Kernel>
Report run_two_ranks(const Options& options, int variant, int threads = 32, int blocks = 1) {
  auto board = std::make_unique<Board>();
  Simulation simulation(2, options);
  simulation.buffers().add(board.get(), sizeof(Board));
  for (int rank = 0; rank < 2; ++rank)
    cuda::launch<Kernel>({board.get(), rank, variant}, LaunchConfig{blocks, threads},
                         simulation.stream(rank));
  return simulation.run();
}

// The first report that is not "done", over some seeds.
template <class Kernel>
Report first_failure(Options options, int variant, int threads = 32, int blocks = 1) {
  Report report;
  for (int seed = 1; seed <= kSeeds; ++seed) {
    options.seed = static_cast<uint64_t>(seed);
    report = run_two_ranks<Kernel>(options, variant, threads, blocks);
    if (!report.done()) break;
  }
  return report;
}

// ---- a message: rank 0 writes, rank 1 waits and reads

struct Message {
  using Args = sim::Args;
  static constexpr int kMaxThreads = 64;
  enum Variant { kRight, kNoBarrier, kRelaxedStore, kRelaxedLoad, kNoWait };
  static inline int wrong = 0;

  static void run(const Args& args) {
    const auto thread = static_cast<size_t>(threadIdx.x);
    uint32_t* const signal = args.board->signal;
    if (args.rank == 0) {
      peer::store_plain(&args.board->data[thread], Vector16{{1, 2, 3, uint32_t(thread)}});
      if (args.variant != kNoBarrier) __syncthreads();
      if (thread == 0 && args.variant == kRelaxedStore) peer::store_relaxed(signal, 1u);
      if (thread == 0 && args.variant != kRelaxedStore) peer::store_release(signal, 1u);
      return;
    }
    if (thread == 0 && args.variant != kNoWait) {
      while ((args.variant == kRelaxedLoad ? peer::load_relaxed(signal)
                                           : peer::load_acquire(signal)) == 0)
        peer::spin_hint();
    }
    __syncthreads();
    const bool is_wrong = peer::load_plain(&args.board->data[thread]).word[0] != 1;
    __atomic_fetch_add(&wrong, static_cast<int>(is_wrong), __ATOMIC_RELAXED);
  }
};

TEST(a_right_message_passes) {
  for (const Memory memory : {Memory::kStrong, Memory::kWeak}) {
    if (kThreadSanitizer && memory == Memory::kWeak) continue;
    Message::wrong = 0;
    const Report report = first_failure<Message>({.memory = memory}, Message::kRight);
    CHECK(report.done(), "%s", report.text.c_str());
    CHECK(Message::wrong == 0, "%d values are wrong", Message::wrong);
  }
}

// ThreadSanitizer must report this one, so there it runs only when asked for.
TEST(random_interleavings_find_a_missing_barrier) {
  if (kThreadSanitizer && std::getenv("PYCOLL_SIM_PLANTED") == nullptr) return;
  Message::wrong = 0;
  const Report report = first_failure<Message>({}, Message::kNoBarrier);
  CHECK(report.done() && Message::wrong > 0, "%s", report.text.c_str());
}

TEST(weak_memory_finds_what_is_not_ordered) {
  if (kThreadSanitizer) return;
  for (const int variant :
       {Message::kNoBarrier, Message::kRelaxedStore, Message::kRelaxedLoad, Message::kNoWait}) {
    const Report report = first_failure<Message>({.memory = Memory::kWeak}, variant);
    CHECK(report.verdict == Verdict::kRace, "variant %d: %s", variant, report.text.c_str());
    CHECK(contains(report.text, "load_plain") || contains(report.text, "store_plain"), "%s", "");
    CHECK(contains(report.text, "not ordered with rank"), "%s", "");
  }
}

// ---- two relaxed words: their order may be seen reversed

struct StoreTwo {
  using Args = sim::Args;
  static constexpr int kMaxThreads = 32;
  static inline int reversed = 0;

  static void run(const Args& args) {
    uint32_t* const signal = args.board->signal;
    if (args.rank == 0) {
      peer::store_relaxed(signal, 1u);
      peer::store_relaxed(signal + 1, 1u);
    } else {
      const uint32_t second = peer::load_relaxed(signal + 1);
      reversed += second == 1 && peer::load_relaxed(signal) == 0;
    }
  }
};

TEST(relaxed_stores_are_seen_in_any_order_under_weak_memory_only) {
  if (kThreadSanitizer) return;
  for (const Memory memory : {Memory::kStrong, Memory::kWeak}) {
    StoreTwo::reversed = 0;
    for (int seed = 1; seed <= 300; ++seed)
      run_two_ranks<StoreTwo>({.seed = uint64_t(seed), .preempt_percent = 50, .memory = memory}, 0,
                              1);
    CHECK((StoreTwo::reversed > 0) == (memory == Memory::kWeak), "%d times", StoreTwo::reversed);
  }
}

// A thread that has seen a word never sees an older one, and the last value comes in the end.
struct Coherence {
  using Args = sim::Args;
  static constexpr int kMaxThreads = 32;
  static inline int backward = 0;

  static void run(const Args& args) {
    uint32_t* const signal = args.board->signal;
    constexpr uint32_t kLast = 20;
    if (args.rank == 0) {
      for (uint32_t i = 1; i <= kLast; ++i) peer::store_relaxed(signal, i);
      return;
    }
    for (uint32_t before = 0; before != kLast;) {
      const uint32_t now = peer::load_relaxed(signal);
      backward += now < before;
      if (now == before) peer::spin_hint();
      before = now;
    }
  }
};

TEST(one_word_never_goes_backward) {
  if (kThreadSanitizer) return;
  const Report report = first_failure<Coherence>({.memory = Memory::kWeak}, 0, 1);
  CHECK(report.done(), "%s", report.text.c_str());
  CHECK(Coherence::backward == 0, "%d times", Coherence::backward);
}

// ---- atoms and lines

struct Torn {
  using Args = sim::Args;
  static constexpr int kMaxThreads = 32;
  enum Variant { kAtoms, kLine };
  static inline int halves_differ = 0;
  static inline int lines_differ = 0;

  static void run(const Args& args) {
    Vector16* const at = args.board->data + threadIdx.x;
    if (args.rank == 0) {
      if (args.variant == kLine) peer::store_line(at, {{7, 7, 7, 7}});
      if (args.variant == kAtoms) peer::store_two_atoms(at, {{7, 7, 7, 7}});
      return;
    }
    for (int i = 0; i < 3; ++i) {
      const Vector16 v = args.variant == kLine ? peer::load_line(at) : peer::load_two_atoms(at);
      halves_differ += v.word[0] != v.word[2];
      const uint32_t of_lane_0 = __shfl_sync(0xff, v.word[0], 0);
      lines_differ += v.word[0] != of_lane_0;
      CHECK(v.word[0] == v.word[1] && v.word[2] == v.word[3], "an atom of 8 bytes is torn");
    }
  }
};

TEST(halves_come_apart_and_lines_only_when_told) {
  if (kThreadSanitizer) return;
  for (const Memory memory : {Memory::kStrong, Memory::kWeak}) {
    Torn::halves_differ = Torn::lines_differ = 0;
    CHECK(first_failure<Torn>({.memory = memory}, Torn::kAtoms, 8).done(), "%s", "atoms");
    CHECK(Torn::halves_differ > 0, "%s", "no half ever came first");
    Torn::halves_differ = Torn::lines_differ = 0;
    CHECK(first_failure<Torn>({.memory = memory}, Torn::kLine, 8).done(), "%s", "lines");
    CHECK(Torn::halves_differ == 0 && Torn::lines_differ == 0, "%s", "a line is torn");
    CHECK(first_failure<Torn>({.memory = memory, .tear_lines = true}, Torn::kLine, 8).done(), "%s",
          "torn lines");
    CHECK(Torn::lines_differ > 0, "%s", "no line was torn");
  }
}

// ---- what stops a run

struct Wrong {
  using Args = sim::Args;
  static constexpr int kMaxThreads = 64;
  enum Variant { kNobodyWrites, kDivergentBarrier, kBeyondTheBuffer, kLaneNotInMask, kEndsEarly };

  static void run(const Args& args) {
    const unsigned thread = threadIdx.x;
    switch (args.variant) {
      case kNobodyWrites:
        while (peer::load_acquire(args.board->signal) != 9) peer::spin_hint();
        return;
      case kDivergentBarrier:
        if (thread % 2 == 0) __syncthreads();
        if (thread % 2 == 1) __syncwarp(0xffffffffu);
        return;
      case kBeyondTheBuffer:
        peer::load_plain(&args.board->data[0] + 72);
        return;
      case kLaneNotInMask:
        __syncwarp(1u);
        return;
      case kEndsEarly:
        if (thread == 3) return;
        __syncthreads();
        return;
    }
  }
};

TEST(a_deadlock_is_reported_for_each_thread) {
  if (kThreadSanitizer) return;
  const Report report = run_two_ranks<Wrong>({}, Wrong::kNobodyWrites, 2);
  CHECK(report.verdict == Verdict::kDeadlock, "%s", name(report.verdict));
  CHECK(contains(report.text, "rank 0 block 0 thread 0 in"), "%s", "");
  CHECK(contains(report.text, "rank 1 block 0 thread 1"), "%s", "");
  CHECK(contains(report.text, "spins: load_acquire of 4 bytes"), "%s", "");
  CHECK(contains(report.text, "test_simulator.cpp:"), "%s", "");
}

TEST(divergence_is_a_deadlock_that_names_the_barriers) {
  if (kThreadSanitizer) return;
  const Report report = run_two_ranks<Wrong>({}, Wrong::kDivergentBarrier);
  CHECK(report.verdict == Verdict::kDeadlock, "%s", name(report.verdict));
  CHECK(contains(report.text, "thread 0 in"), "%s", "");
  CHECK(contains(report.text, "waits in __syncthreads"), "%s", "");
  CHECK(contains(report.text, "waits in __syncwarp"), "%s", "");
}

TEST(an_access_beside_the_buffers_is_found) {
  if (kThreadSanitizer) return;
  const Report report = run_two_ranks<Wrong>({}, Wrong::kBeyondTheBuffer);
  CHECK(report.verdict == Verdict::kBadAccess, "%s", name(report.verdict));
  CHECK(contains(report.text, "load_plain of 16 bytes"), "%s", "");
}

TEST(a_lane_must_be_in_its_mask) {
  if (kThreadSanitizer) return;
  const Report report = run_two_ranks<Wrong>({}, Wrong::kLaneNotInMask);
  CHECK(report.verdict == Verdict::kMisuse, "%s", name(report.verdict));
}

TEST(threads_that_have_ended_are_not_waited_for) {
  const Report report = first_failure<Wrong>({}, Wrong::kEndsEarly);
  CHECK(report.done(), "%s", report.text.c_str());
}

TEST(the_number_of_steps_is_limited) {
  if (kThreadSanitizer) return;
  const Report report = run_two_ranks<Message>({.max_steps = 10}, Message::kRight);
  CHECK(report.verdict == Verdict::kStepLimit, "%s", name(report.verdict));
}

// ---- blocks, warps, time

// Block 0 waits for the last block of its grid.
struct NeedsAllBlocks {
  using Args = sim::Args;
  static constexpr int kMaxThreads = 32;
  static void run(const Args& args) {
    uint32_t* const signal = args.board->signal + args.rank;
    if (blockIdx.x == gridDim.x - 1) peer::store_release(signal, 1u);
    while (blockIdx.x == 0 && peer::load_acquire(signal) == 0) peer::spin_hint();
  }
};

TEST(blocks_that_do_not_fit_do_not_run) {
  if (kThreadSanitizer) return;
  const auto run = [](int resident, bool one_device) {
    return run_two_ranks<NeedsAllBlocks>({.resident_blocks = resident, .one_device = one_device}, 0,
                                         1, 3);
  };
  CHECK(run(0, false).done(), "%s", "no limit");
  CHECK(run(3, false).done(), "%s", "all fit");
  CHECK(run(2, false).done(), "%s", "block 1 makes room for block 2");
  CHECK(run(1, false).verdict == Verdict::kDeadlock, "%s", "block 0 waits for block 2");
  CHECK(run(3, true).done(), "%s", "room for both ranks' first blocks and one more");
}

struct WarpFunctions {
  using Args = sim::Args;
  static constexpr int kMaxThreads = 64;
  static void run(const Args& args) {
    const unsigned lane = threadIdx.x % 32;
    const uint32_t whole = 0xffffffffu;
    CHECK(__shfl_sync(whole, lane * 3, 5) == 15, "lane %u", lane);
    CHECK(__shfl_xor_sync(whole, lane, 1) == (lane ^ 1u), "lane %u", lane);
    CHECK(__ballot_sync(whole, lane % 2 == 0) == 0x55555555u, "lane %u", lane);
    CHECK(__all_sync(whole, lane < 32) == 1, "lane %u", lane);
    CHECK(__all_sync(whole, lane != 9) == 0, "lane %u", lane);
    CHECK(__any_sync(whole, lane == 9) == 1, "lane %u", lane);
    const uint32_t half = 0xffffu << (lane / 16 * 16);
    CHECK(__shfl_sync(half, lane, static_cast<int>(lane / 16 * 16)) == lane / 16 * 16, "%u", lane);
    CHECK(__syncthreads_and(threadIdx.x < 64) == 1, "lane %u", lane);
    CHECK(__syncthreads_and(threadIdx.x != 40) == 0, "lane %u", lane);
    PYCOLL_SHARED(uint32_t, sums, 2);
    if (lane == 0) sums[threadIdx.x / 32] = threadIdx.x + static_cast<unsigned>(args.rank);
    __syncthreads();
    CHECK(sums[1] == 32u + static_cast<unsigned>(args.rank), "shared memory holds %u", sums[1]);
  }
};

TEST(warp_functions_give_what_the_gpu_gives) {
  const Report report = first_failure<WarpFunctions>({}, 0, 64, 2);
  CHECK(report.done(), "%s", report.text.c_str());
}

struct TimePasses {
  using Args = sim::Args;
  static constexpr int kMaxThreads = 32;
  static void run(const Args& args) {
    const uint64_t start = peer::clock_ns();
    while (peer::load_acquire(args.board->signal) == 0) {
      if (peer::clock_ns() - start > 3'000'000'000u) return;
      peer::spin_hint();
    }
  }
};

TEST(time_passes_when_everybody_waits) {
  const Report report = run_two_ranks<TimePasses>({}, 0);
  CHECK(report.done(), "%s", report.text.c_str());
}

TEST(the_same_seed_gives_the_same_run) {
  const auto switches = [](uint64_t seed) {
    return run_two_ranks<Message>({.seed = seed}, Message::kRight).switches;
  };
  CHECK(switches(3) == switches(3), "%s", "it is not reproducible");
  bool any_differs = false;
  for (uint64_t seed = 4; seed < 9; ++seed) any_differs |= switches(seed) != switches(3);
  CHECK(any_differs, "%s", "the seed changes nothing");
}

}  // namespace
}  // namespace pycoll::sim

int main(int argc, char** argv) { return run_tests(argc, argv); }
