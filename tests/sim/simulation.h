// Runs CUDA kernels on the CPU: every thread of every block of every rank is a fiber, and a seeded scheduler decides who goes on.
// README.md says what can be found that way.
//
//   Simulation simulation(world_size, options);
//   launch_barrier(args[0], config, simulation.stream(0));   // and the other ranks
//   const Report report = simulation.run();
//   CHECK(report.done(), "%s", report.text.c_str());
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "buffers.h"

namespace pycoll::sim {

enum class Memory {
  kStrong,  // a store is seen by every load that comes after it
  kWeak,  // a load may give an older value unless a release and an acquire forbid it (weak_memory.h)
};

struct Options {
  uint64_t seed = 1;
  int preempt_percent =
      10;  // chance that a thread is left before an access to memory that others see
  Memory memory = Memory::kStrong;
  bool check_races =
      true;  // of weak memory: report plain accesses that are not ordered with others'
  bool tear_lines = false;  // lines of 128 bytes arrive in parts
  // Blocks that run at once on a device; the others wait until one ends. 0: no limit.
  int resident_blocks = 0;
  bool one_device = false;  // all ranks share one device, rather than having one each
  // Nobody else writes to the memory: if all threads wait, they wait forever. Not so when each rank has a scheduler of its own;
  // then kernels' clocks are the host's.
  bool alone = true;
  uint64_t max_steps = 500'000'000;  // visible accesses and changes of thread
};

enum class Verdict {
  kDone,
  kDeadlock,
  kStepLimit,
  kRace,
  kBadAccess,  // of memory that no buffer owns
  kMisuse,     // of a warp's or a block's functions
};

const char* name(Verdict verdict);

struct Report {
  Verdict verdict = Verdict::kDone;
  std::string text;  // what is wrong, for each thread that matters
  uint64_t accesses = 0;
  uint64_t switches = 0;

  bool done() const { return verdict == Verdict::kDone; }
};

struct Launch {
  std::string name;
  int num_blocks = 1;
  int threads_per_block = 1;
  std::function<void()> body;  // what each thread does
};

// The kernels of one rank, which run one after another.
class Stream {
 public:
  void launch(Launch launch) { launches_.push_back(std::move(launch)); }
  // What was launched, which then does not run here.
  std::vector<Launch> take() { return std::exchange(launches_, {}); }

 private:
  friend class Scheduler;
  std::vector<Launch> launches_;
};

class Scheduler;

class Simulation {
 public:
  Simulation(int num_ranks, const Options& options);
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  Stream* stream(int rank) { return &streams_[static_cast<size_t>(rank)]; }
  // Memory that kernels may touch. Until one is added, they may touch all.
  BufferMap& buffers() { return buffers_; }

  // Everything that was launched since the last run. After a verdict other than kDone the simulation is used up.
  Report run();

 private:
  const Options options_;
  std::vector<Stream> streams_;
  BufferMap buffers_;
  std::unique_ptr<Scheduler> scheduler_;
};

}  // namespace pycoll::sim
