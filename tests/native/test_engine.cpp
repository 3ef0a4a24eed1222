// Operations from their submission to their end: who drives them, and what ends them early.
#include <future>
#include <random>

#include "guarded.h"
#include "sums.h"

using namespace pycoll;
using namespace pycoll::test;

TEST(events_tell_what_was_done) {
  run_ranks(2, [](Communicator& comm) {
    Sum small(comm, 10), large(comm, kLarge);
    small.check(comm);
    large.check(comm);
    comm.run(barrier_request(), kTimeout);
    const std::vector<Event> events = comm.events();
    CHECK(events.size() == 3 && comm.sequence() == 4);
    const char* const algorithms[] = {"one_shot", "two_shot", "direct"};
    for (size_t i = 0; i < events.size(); ++i) {
      const Event& event = events[i];
      CHECK(event.sequence == i + 1 && !event.failed && event.peer == -1);
      CHECK(std::string(event.algorithm) == algorithms[i], "%s", event.algorithm);
      CHECK(event.queued_ns <= event.started_ns && event.started_ns <= event.ended_ns &&
            event.queued_ns > 0);
    }
    CHECK(events[0].nbytes == 40 && events[0].bytes_written == 40 && events[0].bytes_read == 40);
    CHECK(events[1].nbytes == 4 * kLarge && events[1].bytes_written == 4 * kLarge &&
          events[1].bytes_read == 4 * kLarge);
    CHECK(std::string(events[2].operation) == "barrier" && events[2].nbytes == 0);
  });
}

TEST(events_are_kept_up_to_a_limit) {
  run_ranks(2, [](Communicator& comm) {
    for (int i = 0; i < 1100; ++i) comm.run(barrier_request(), kTimeout);
    const std::vector<Event> events = comm.events();
    CHECK(events.size() == 1024 && events.front().sequence == 77 && events.back().sequence == 1100);
  });
}

TEST(group_of_one_needs_nobody) {
  MeetingPlace place;
  ThreadExchange exchange(place.find({0}, 0), 0);
  const auto comm = Communicator::create(
      &exchange, [](const Env&) -> std::shared_ptr<Runtime> { std::abort(); }, {});
  Sum sum(*comm, 1000);
  sum.check(*comm);
  CHECK(comm->sequence() == 2 && comm->failure().empty());
  comm->close(milliseconds(0));
}

// ---- timeouts

TEST(timeout_zero_and_the_group_afterwards) {
  run_ranks(2, [](Communicator& comm) {
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(300));
      Sum late(comm, kLarge);
      comm.wait(late.operation, Deadline::never());
      CHECK(contains(text_of(late.operation, ErrorKind::kPeerFailed),
                     "rank 0 gave up: rank 0 timed out in all_reduce"));
      return;
    }
    const int64_t start = now_ns();
    Sum hasty(comm, kLarge, milliseconds(0));
    comm.wait(hasty.operation, Deadline::never());
    CHECK(ms_since(start) < 200, "%ld ms", ms_since(start));
    CHECK(contains(text_of(hasty.operation, ErrorKind::kTimeout),
                   "Timed out waiting 0 ms for rank 1"));
    CHECK(contains(comm.failure(), "an earlier operation on it failed (rank 0 timed out"));
    try {
      comm.run(barrier_request(), kTimeout);
      CHECK(false, "the group is unusable");
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kAborted &&
            contains(error.what(), "destroy it and make a new one"));
    }
    std::this_thread::sleep_for(
        milliseconds(600));  // rank 1 shall find the group poisoned, not closed
  });
}

TEST(wait_with_patience_and_then_again) {
  run_ranks(2, [](Communicator& comm) {
    if (comm.rank() == 1) std::this_thread::sleep_for(milliseconds(300));
    Sum sum(comm, kLarge);
    if (comm.rank() == 0) {
      const int64_t start = now_ns();
      CHECK(!comm.wait(sum.operation, Deadline::after(milliseconds(50))));
      CHECK(ms_since(start) >= 50 && ms_since(start) < 250);
      CHECK(!comm.wait(sum.operation, Deadline::after(milliseconds(0))));
      CHECK(!sum.operation->finished());
    }
    sum.check(comm);
  });
}

TEST(poll_completes_an_operation) {
  run_ranks(2, [](Communicator& comm) {
    Sum sum(comm, 8);
    const Deadline deadline = Deadline::after(kTimeout);
    while (!comm.poll(sum.operation) && !deadline.passed()) std::this_thread::yield();
    sum.check(comm);
  });
}

// An operation that is queued behind another one ends at its own deadline as well.
TEST(timeout_behind_another_operation) {
  run_ranks(2, [](Communicator& comm) {
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(1500));
      return;
    }
    Sum first(comm, kLarge), second(comm, kLarge, milliseconds(100));
    const int64_t start = now_ns();
    comm.wait(second.operation, Deadline::after(milliseconds(1000)));
    CHECK(ms_since(start) < 600, "100 ms became %ld ms", ms_since(start));
    CHECK(second.operation->finished() && second.operation->error() != nullptr);
    CHECK(contains(comm.failure(), "Timed out waiting 100 ms"));
  });
}

// A rank that refuses its arguments waits for the others nevertheless: they have not read its reason yet.
TEST(each_refusal_is_read_by_all) {
  run_ranks(3, [](Communicator& comm) {
    constexpr int kCalls = 7;
    if (comm.rank() == 1) {
      for (int i = 0; i < kCalls; ++i) comm.refuse(Collective::kAllReduce, concat("reason ", i));
    } else {
      std::this_thread::sleep_for(milliseconds(50 * comm.rank()));
      for (int i = 0; i < kCalls; ++i) {
        const Data data = ones(100);
        std::string text;
        try {
          comm.run(sum_request(data), kTimeout);
        } catch (const Error& error) {
          text = error.what();
          CHECK(error.kind() == ErrorKind::kMismatch);
        }
        CHECK(contains(text, concat("rank 1 refused its arguments (reason ", i, ")")));
        CHECK(data->front() == 1.0f && data->back() == 1.0f, "an output was written to");
      }
    }
    Sum afterwards(comm, 10);
    afterwards.check(comm);
  });
}

// ---- abort

TEST(abort_while_other_threads_wait) {
  run_ranks(2, [](Communicator& comm) {
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(200));
      Sum sum(comm, kLarge);
      comm.wait(sum.operation, Deadline::never());
      CHECK(contains(text_of(sum.operation, ErrorKind::kPeerFailed),
                     "rank 0 gave up: enough of this"));
      return;
    }
    Sum first(comm, kLarge), second(comm, kLarge);
    Guarded<uint8_t> byte(1);
    const OperationPtr message =
        comm.receive(byte.data(), 1, DType::kUInt8, 1, 0, kTimeout, nullptr);
    std::vector<std::thread> waiting;
    for (const OperationPtr& operation : {message, second.operation}) {
      waiting.emplace_back([&comm, operation] { comm.wait(operation, Deadline::never()); });
    }
    std::this_thread::sleep_for(milliseconds(50));
    const int64_t start = now_ns();
    comm.abort("enough of this");
    for (std::thread& thread : waiting) thread.join();
    CHECK(ms_since(start) < 1000, "%ld ms", ms_since(start));
    for (const OperationPtr& operation : {message, first.operation, second.operation}) {
      CHECK(contains(text_of(operation, ErrorKind::kAborted), "enough of this"));
    }
    CHECK(contains(comm.failure(), "enough of this"));
    std::this_thread::sleep_for(
        milliseconds(500));  // rank 1 shall find the group poisoned, not closed
  });
}

TEST(interrupt_reaches_a_waiting_thread) {
  run_runtimes(2, [](Rank& rank) {
    std::atomic<bool> interrupted{false};
    RankOptions options;
    options.interrupt = [&interrupted] {
      if (interrupted.load()) throw std::runtime_error("Ctrl-C");
    };
    const auto comm = rank.make_group(options);
    if (rank.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(500));
      return;
    }
    // An operation that somebody waits for goes on after the interrupt.
    Sum sum(*comm, kLarge);
    std::thread signal([&] {
      std::this_thread::sleep_for(milliseconds(50));
      interrupted = true;
    });
    const auto text_of_interrupt = [](const auto& fn) -> std::string {
      try {
        fn();
      } catch (const std::runtime_error& error) {
        return error.what();
      }
      return "";
    };
    CHECK(text_of_interrupt([&] { comm->wait(sum.operation, Deadline::never()); }) == "Ctrl-C");
    CHECK(!sum.operation->finished() && comm->failure().empty());
    // One that lives on the caller's stack cannot.
    CHECK(text_of_interrupt([&] { comm->run(sum_request(ones(8)), kTimeout); }) == "Ctrl-C");
    CHECK(contains(text_of(sum.operation, ErrorKind::kAborted),
                   "was interrupted by a signal in all_reduce"));
    CHECK(contains(comm->failure(), "was interrupted by a signal"));
    signal.join();
  });
}

// ---- several groups and threads

TEST(groups_interleave_on_one_endpoint) {
  run_runtimes(3, [](Rank& rank) {
    std::vector<std::shared_ptr<Communicator>> groups;
    for (const char* algorithm : {"auto", "ring", "two_shot"})
      groups.push_back(rank.make_group(RankOptions{algorithm}));
    // And those of two ranks each, of which this rank is in two.
    for (const auto& members : std::vector<std::vector<int>>{{0, 1}, {0, 2}, {1, 2}}) {
      if (members[0] == rank.rank() || members[1] == rank.rank())
        groups.push_back(rank.make_group(members));
    }
    CHECK(rank.runtime()->endpoint->num_peers() == 2, "peers are connected once");
    std::mt19937 random(static_cast<unsigned>(rank.rank()));
    for (int i = 0; i < 20; ++i) {
      std::vector<std::unique_ptr<Sum>> sums;
      for (auto& group : groups) {
        sums.push_back(
            std::make_unique<Sum>(*group, i % 2 == 0 ? 7 : kLarge / 4, milliseconds(10000)));
      }
      // Each rank waits in an order of its own: whatever a peer needs has to happen meanwhile.
      std::vector<size_t> order(groups.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      for (const size_t g : order) sums[g]->check(*groups[g]);
    }
    for (auto& group : groups) group->close(milliseconds(1000));
  });
}

TEST(threads_of_a_rank_wait_for_different_operations) {
  run_ranks(2, [](Communicator& comm) {
    for (int round = 0; round < 10; ++round) {
      std::vector<std::unique_ptr<Sum>> sums;
      for (int i = 0; i < 4; ++i)
        sums.push_back(std::make_unique<Sum>(comm, i % 2 == 0 ? 5 : kLarge / 3));
      Guarded<uint8_t> out(50000), in(50000);
      const int peer = 1 - comm.rank();
      const OperationPtr sent = comm.send(out.data(), 50000, DType::kUInt8, peer, 0, kTimeout);
      const OperationPtr received =
          comm.receive(in.data(), 50000, DType::kUInt8, peer, 0, kTimeout, nullptr);
      std::vector<std::thread> waiting;
      for (size_t i = sums.size(); i-- > 0;) waiting.emplace_back([&, i] { sums[i]->check(comm); });
      waiting.emplace_back([&] { CHECK(comm.wait(sent, Deadline::never())); });
      waiting.emplace_back([&] { CHECK(comm.wait(received, Deadline::never())); });
      for (std::thread& thread : waiting) thread.join();
      CHECK(received->error() == nullptr && in.intact());
    }
  });
}

// Waiting must not be slow because a wake-up got lost: then it would take a slice of the sleep.
TEST(no_wake_up_is_late) {
  for (const int n : {2, 3, 4}) {
    std::atomic<int64_t> slow{0};
    run_ranks(n, [&](Communicator& comm) {
      std::mt19937 random(static_cast<unsigned>(comm.rank()) + 7);
      for (int i = 0; i < 600; ++i) {
        if (random() % 4 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
        const int64_t start = now_ns();
        comm.run(barrier_request(), kTimeout);
        if (ms_since(start) >= kSleepSlice.count()) slow.fetch_add(1);
      }
    });
    // A loaded machine may well keep a thread from running for that long, but not often.
    CHECK(slow.load() < 10 * n, "%ld of %d barriers of %d ranks took a whole slice", slow.load(),
          600 * n, n);
  }
}

// ---- the background

TEST(callbacks_run_in_the_background) {
  run_ranks(2, [](Communicator& comm) {
    std::vector<std::unique_ptr<Sum>> sums;
    std::vector<std::promise<void>> done(20);
    for (size_t i = 0; i < done.size(); ++i) {
      sums.push_back(std::make_unique<Sum>(comm, i % 2 == 0 ? 3 : kLarge / 8));
      if (!sums[i]->operation->add_callback([&done, i] { done[i].set_value(); }))
        done[i].set_value();
      comm.drive_in_background(sums[i]->operation);
    }
    for (size_t i = 0; i < done.size(); ++i) {
      CHECK(done[i].get_future().wait_for(kTimeout) == std::future_status::ready, "callback %zu",
            i);
      sums[i]->check(comm);
      CHECK(!sums[i]->operation->add_callback([] { CHECK(false, "too late"); }));
    }
  });
}

TEST(long_operations_complete_though_nobody_waits) {
  run_ranks(2, [](Communicator& comm) {
    Sum sum(comm, kLarge);
    const Deadline deadline = Deadline::after(kTimeout);
    while (!sum.operation->finished() && !deadline.passed())
      std::this_thread::sleep_for(milliseconds(1));
    CHECK(sum.operation->finished());
    sum.check(comm);
  });
}

// Somebody starts an operation just as the last waiter leaves: one of them has to see to it.
TEST(an_operation_started_as_a_waiter_leaves_is_driven) {
  run_ranks(2, [](Communicator& comm) {
    for (int i = 0; i < 300; ++i) {
      Sum first(comm, 5);
      std::thread waiter([&] { first.check(comm); });
      if (i % 3 != 0) std::this_thread::sleep_for(std::chrono::microseconds(i % 50));
      Sum second(comm, kLarge / 10);
      waiter.join();
      const Deadline deadline = Deadline::after(milliseconds(5000));
      while (!second.operation->finished() && !deadline.passed())
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      CHECK(second.operation->finished(), "round %d: nobody drives it", i);
      second.check(comm);
    }
  });
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
