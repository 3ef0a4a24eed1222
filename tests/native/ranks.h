// Ranks as threads of one process: each has an endpoint and communicators of its own.
#pragma once

#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "bootstrap/thread_exchange.h"
#include "check.h"
#include "engine/communicator.h"

namespace pycoll::test {

struct RankOptions {
  std::string algorithm = "auto";
  std::chrono::milliseconds timeout{60000};
  uint64_t first_sequence = 1;
};

// Runs fn(communicator) on every rank; an exception on a rank is a failure.
inline void run_ranks(int world_size, const std::function<void(Communicator&)>& fn, RankOptions options = {}) {
  auto rendezvous = std::make_shared<ThreadRendezvous>(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ThreadExchange exchange(rendezvous, rank);
        CommunicatorOptions communicator_options;
        communicator_options.algorithm = options.algorithm;
        communicator_options.timeout = options.timeout;
        communicator_options.first_sequence = options.first_sequence;
        // A small reservation: race detectors keep shadow memory for all of it.
        const auto make_runtime = [](const Env& env) {
          Env small = env;
          small.segment_bytes = size_t{64} << 20;
          return Runtime::create(small);
        };
        auto communicator = Communicator::create(&exchange, make_runtime, communicator_options);
        fn(*communicator);
        communicator->close(std::chrono::milliseconds(1000));
      } catch (const std::exception& error) {
        CHECK(false, "rank %d of %d: %s", rank, world_size, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace pycoll::test
