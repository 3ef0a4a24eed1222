#include "kernels/cpu/roofline.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "base/clock.h"
#include "base/error.h"

namespace pycoll::cpu {
namespace {

class Mapping {
 public:
  explicit Mapping(size_t nbytes) : nbytes_(std::max<size_t>(nbytes, 1)) {
    void* const base = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (base == MAP_FAILED) {
      fail(ErrorKind::kSystem, "the roofline needs ", nbytes_,
           " bytes of shared memory and cannot map them: ", std::strerror(errno),
           "; measure smaller sizes");
    }
    base_ = static_cast<std::byte*>(base);
  }
  ~Mapping() { munmap(base_, nbytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* base() const { return base_; }

 private:
  const size_t nbytes_;
  std::byte* base_;
};

// Each thread writes its own line and reads the others': one cache miss a peer, as the handshake of a collective has it.
class Barrier {
 public:
  Barrier(size_t num_threads, bool yields) : lines_(num_threads), yields_(yields) {}

  void wait(size_t thread) {
    const uint64_t mine = lines_[thread].value.load(std::memory_order_relaxed) + 1;
    lines_[thread].value.store(mine, std::memory_order_release);
    for (const Line& line : lines_) {
      while (line.value.load(std::memory_order_acquire) < mine) {
        if (yields_) sched_yield();
      }
    }
  }

 private:
  struct alignas(64) Line {
    std::atomic<uint64_t> value{0};
  };
  std::vector<Line> lines_;
  const bool yields_;
};

std::vector<int> cores_to_use() {
  std::vector<int> cores;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &set)) cores.push_back(core);
    }
  }
  return cores;
}

// The calling thread stays on a core while this lives. Without effect where the system does not say which cores there are.
void pin(const std::vector<int>& cores, size_t thread) {
  if (cores.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cores[thread % cores.size()], &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

void check(const RooflineArgs& args) {
  PYCOLL_CHECK_ARG(!args.transfers.empty(), "transfers has no rank; give at least one");
  PYCOLL_CHECK_ARG(args.owned.size() == args.transfers.size(), "owned has ", args.owned.size(),
                   " ranks and transfers ", args.transfers.size(), "; give both the same");
  for (const auto& of_rank : args.owned) {
    for (const Range& range : of_rank) {
      PYCOLL_CHECK_ARG(
          range.begin <= args.mapping_nbytes && range.nbytes <= args.mapping_nbytes - range.begin,
          "an owned range of ", range.nbytes, " bytes at ", range.begin,
          " ends outside the mapping of ", args.mapping_nbytes, " bytes");
    }
  }
  PYCOLL_CHECK_ARG(args.repetitions > 0, "repetitions is ", args.repetitions, "; give 1 or more");
  for (const auto& of_rank : args.transfers) {
    for (const Transfer& transfer : of_rank) {
      for (const auto* offsets : {&transfer.sources, &transfer.destinations}) {
        PYCOLL_CHECK_ARG(!offsets->empty() && offsets->size() <= kMostOperands, "a transfer has ",
                         offsets->size(), " sources or destinations; give 1 to ", kMostOperands);
        for (const size_t offset : *offsets) {
          PYCOLL_CHECK_ARG(offset % kRooflineAlignment == 0, "offset ", offset,
                           " is no multiple of ", kRooflineAlignment);
          PYCOLL_CHECK_ARG(
              offset <= args.mapping_nbytes && transfer.nbytes <= args.mapping_nbytes - offset,
              "a transfer of ", transfer.nbytes, " bytes at ", offset,
              " ends outside the mapping of ", args.mapping_nbytes, " bytes");
        }
      }
    }
  }
}

// Runs every rank's transfers over and over, all ranks at once.
class Run {
 public:
  explicit Run(const RooflineArgs& args)
      : args_(args),
        mapping_(args.mapping_nbytes),
        cores_(cores_to_use()),
        barrier_(args.transfers.size(), args.transfers.size() > cores_.size()) {}

  // Seconds a sweep of all ranks.
  double median(const InstructionSet& set, Store store) {
    sweep_ = set.sweep;
    store_ = store;
    const double estimate = timed(2);
    const double wanted = args_.repetition_seconds / std::max(estimate, 1e-9);
    const int sweeps = static_cast<int>(std::clamp(wanted, 2.0, 200'000.0));
    std::vector<double> seconds;
    for (int i = 0; i < args_.repetitions; ++i) seconds.push_back(timed(sweeps));
    std::nth_element(seconds.begin(), seconds.begin() + args_.repetitions / 2, seconds.end());
    return seconds[static_cast<size_t>(args_.repetitions / 2)];
  }

 private:
  double timed(int sweeps) {
    double seconds = 0;
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < args_.transfers.size(); ++rank) {
      threads.emplace_back([&, rank] {
        pin(cores_, rank);
        int64_t total_ns = 0;
        for (int i = 0; i < sweeps; ++i) {
          write_owned(rank);
          barrier_.wait(rank);
          const int64_t start = now_ns();
          sweep_once(rank);
          barrier_.wait(rank);
          total_ns += now_ns() - start;
        }
        if (rank == 0) seconds = static_cast<double>(total_ns) * 1e-9 / sweeps;
      });
    }
    for (std::thread& thread : threads) thread.join();
    return seconds;
  }

  void write_owned(size_t rank) {
    for (const Range& range : args_.owned[rank]) {
      volatile std::byte* const begin = mapping_.base() + range.begin;
      for (size_t i = 0; i < range.nbytes; i += kRooflineAlignment) begin[i] = std::byte{0};
    }
  }

  void sweep_once(size_t rank) {
    for (const Transfer& transfer : args_.transfers[rank]) {
      sweep_(mapping_.base(), transfer, store_);
    }
  }

  const RooflineArgs& args_;
  const Mapping mapping_;
  const std::vector<int> cores_;
  Barrier barrier_;
  decltype(InstructionSet::sweep) sweep_ = nullptr;
  Store store_ = Store::kOrdinary;
};

}  // namespace

Roofline measure_roofline(const RooflineArgs& args) {
  check(args);
  const InstructionSet widest = roofline_instruction_sets().back();
  Run run(args);
  Roofline best{run.median(widest, Store::kOrdinary), Store::kOrdinary, widest.name};
  const double past_caches = run.median(widest, Store::kNonTemporal);
  if (past_caches < best.seconds) {
    best.seconds = past_caches;
    best.store = Store::kNonTemporal;
  }
  return best;
}

}  // namespace pycoll::cpu
