// Ranks as threads of one process: each has an endpoint of its own, and communicators on it.
#pragma once

#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "bootstrap/thread_exchange.h"
#include "check.h"
#include "engine/communicator.h"

namespace pycoll::test {

// What PYCOLL_MEMORY_PATH is for groups that are made from now on. At the start: all through staging, since race detectors do not see
// what the kernel copies from process to process.
inline void use_memory_path(const char* path) { setenv("PYCOLL_MEMORY_PATH", path, 1); }
inline const bool g_begins_staged = (use_memory_path("staged"), true);

struct RankOptions {
  std::string algorithm = "auto";
  std::chrono::milliseconds timeout{60000};
  uint64_t first_sequence = 1;
  InterruptCheck interrupt = {};
};

// Where the threads of one run meet to make groups.
class MeetingPlace {
 public:
  // The same for all members that make their `turn`-th group of these ranks.
  std::shared_ptr<ThreadRendezvous> find(const std::vector<int>& members, int turn) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& place = places_[{members, turn}];
    if (place == nullptr)
      place = std::make_shared<ThreadRendezvous>(static_cast<int>(members.size()));
    return place;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::vector<int>, int>, std::shared_ptr<ThreadRendezvous>> places_;
};

// One rank: a thread, and the runtime that all its groups share.
class Rank {
 public:
  Rank(MeetingPlace* place, int rank, int world_size)
      : place_(place), rank_(rank), world_size_(world_size) {
    Env env = Env::read();
    // A small reservation: race detectors keep shadow memory for all of it.
    env.segment_bytes = size_t{64} << 20;
    runtime_ = Runtime::create(env);
  }

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }

  // Collective over all ranks: a group more.
  std::shared_ptr<Communicator> make_group(const RankOptions& options = {}) {
    std::vector<int> all(static_cast<size_t>(world_size_));
    std::iota(all.begin(), all.end(), 0);
    return make_group(all, options);
  }

  // Collective over `members`, in ascending order, of which this rank is one.
  std::shared_ptr<Communicator> make_group(const std::vector<int>& members,
                                           const RankOptions& options = {}) {
    const auto me = std::find(members.begin(), members.end(), rank_);
    ThreadExchange exchange(place_->find(members, turns_[members]++),
                            static_cast<int>(me - members.begin()));
    CommunicatorOptions communicator_options;
    communicator_options.algorithm = options.algorithm;
    communicator_options.timeout = options.timeout;
    communicator_options.first_sequence = options.first_sequence;
    communicator_options.interrupt = options.interrupt;
    return Communicator::create(
        &exchange, [this](const Env&) { return runtime_; }, communicator_options);
  }

 private:
  MeetingPlace* const place_;
  const int rank_, world_size_;
  std::shared_ptr<Runtime> runtime_;
  std::map<std::vector<int>, int> turns_;
};

// Runs fn(rank) on every rank; an exception on a rank is a failure.
inline void run_runtimes(int world_size, const std::function<void(Rank&)>& fn) {
  MeetingPlace place;
  std::vector<std::thread> threads;
  for (int r = 0; r < world_size; ++r) {
    threads.emplace_back([&, r] {
      try {
        Rank rank(&place, r, world_size);
        fn(rank);
      } catch (const std::exception& error) {
        CHECK(false, "rank %d of %d: %s", r, world_size, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Runs fn(communicator) on every rank.
inline void run_ranks(int world_size, const std::function<void(Communicator&)>& fn,
                      RankOptions options = {}) {
  run_runtimes(world_size, [&](Rank& rank) {
    const std::shared_ptr<Communicator> communicator = rank.make_group(options);
    fn(*communicator);
    communicator->close(std::chrono::milliseconds(1000));
  });
}

}  // namespace pycoll::test
