// How groups end, and what they leave behind; groups of two processes.
#include <dirent.h>

#include "guarded.h"
#include "processes.h"
#include "sums.h"

using namespace pycoll;
using namespace pycoll::test;

namespace {

size_t count_entries(const char* folder) {
  size_t count = 0;
  DIR* dir = opendir(folder);
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}
size_t open_files() { return count_entries("/proc/self/fd"); }
size_t threads() { return count_entries("/proc/self/task"); }

}  // namespace

TEST(close_ends_what_is_pending) {
  run_ranks(2, [](Communicator& comm) {
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(300));
      return;
    }
    Sum never(comm, kLarge);
    Guarded<uint8_t> byte(1);
    const OperationPtr message =
        comm.receive(byte.data(), 1, DType::kUInt8, 1, 0, kTimeout, nullptr);
    std::thread waiter([&] { comm.wait(never.operation, Deadline::never()); });
    std::this_thread::sleep_for(milliseconds(20));
    const int64_t start = now_ns();
    comm.close(milliseconds(50));
    CHECK(ms_since(start) < 250, "%ld ms", ms_since(start));
    waiter.join();
    CHECK(contains(text_of(never.operation, ErrorKind::kAborted),
                   "rank 0 destroyed the group while this operation was pending"));
    text_of(message, ErrorKind::kAborted);
    comm.close(milliseconds(50));
    try {
      comm.run(barrier_request(), kTimeout);
      CHECK(false, "the group is closed");
    } catch (const Error& error) {
      CHECK(contains(error.what(), "this group has been destroyed"));
    }
  });
}

TEST(close_gives_peers_what_they_were_promised) {
  run_ranks(2, [](Communicator& comm) {
    const int peer = 1 - comm.rank();
    Sum sum(comm, kLarge);
    Guarded<uint8_t> out(100), in(100);
    const OperationPtr sent = comm.send(out.data(), 100, DType::kUInt8, peer, 0, kTimeout);
    if (comm.rank() == 0) {
      comm.close(milliseconds(10000));
      CHECK(sum.operation->finished() && sum.operation->error() == nullptr);
      CHECK(sent->finished() && sent->error() == nullptr);
      return;
    }
    std::this_thread::sleep_for(milliseconds(100));
    sum.check(comm);
    const OperationPtr received =
        comm.receive(in.data(), 100, DType::kUInt8, peer, 0, kTimeout, nullptr);
    CHECK(comm.wait(received, Deadline::never()) && received->error() == nullptr);
  });
}

TEST(groups_leave_nothing_behind) {
  std::atomic<size_t> files_early{0}, threads_early{0};
  run_runtimes(3, [&](Rank& rank) {
    Arena& arena = rank.runtime()->endpoint->arena();
    size_t most = 0;
    for (int i = 0; i < 200; ++i) {
      const auto group = rank.make_group(RankOptions{i % 2 == 0 ? "auto" : "ring"});
      Sum sum(*group, i % 3 == 0 ? kLarge : 10);
      sum.check(*group);
      Guarded<uint8_t> byte(1);
      const int next = (rank.rank() + 1) % 3, previous = (rank.rank() + 2) % 3;
      const OperationPtr sent = group->send(byte.data(), 1, DType::kUInt8, next, 0, kTimeout);
      const OperationPtr received =
          group->receive(byte.data(), 1, DType::kUInt8, previous, 0, kTimeout, nullptr);
      CHECK(group->wait(received, Deadline::never()) && group->wait(sent, Deadline::never()));
      group->close(milliseconds(1000));
      // What is pending is counted until the arena needs room, so the sum goes up and down.
      most = std::max(most, arena.bytes_in_use());
      if (i == 100) {
        files_early = open_files();
        threads_early = threads();
      }
    }
    // A group's page alone has 36 KiB, its lanes ten times that.
    CHECK(most < size_t{4} << 20, "%zu bytes", most);
    CHECK(open_files() <= files_early + 2, "%zu files became %zu", files_early.load(),
          open_files());
    CHECK(threads() <= threads_early + 2, "%zu threads became %zu", threads_early.load(),
          threads());
  });
}

// ---- two processes

TEST(collectives_between_processes) {
  run_two_processes([](Exchange& exchange) {
    const auto comm =
        Communicator::create(&exchange, [](const Env& env) { return Runtime::create(env); }, {});
    for (const size_t numel : {size_t{1}, size_t{5000}, kLarge}) {
      Sum sum(*comm, numel);
      sum.check(*comm);
    }
    comm->close(milliseconds(1000));
  });
}

TEST(death_of_a_process_is_named) {
  run_two_processes(
      [](Exchange& exchange) {
        const auto comm = Communicator::create(
            &exchange, [](const Env& env) { return Runtime::create(env); }, {});
        Sum before(*comm, 10);
        before.check(*comm);
        if (exchange.rank() == 1) kill(getpid(), SIGKILL);
        const int64_t start = now_ns();
        Sum sum(*comm, kLarge);
        comm->wait(sum.operation, Deadline::never());
        CHECK(contains(text_of(sum.operation, ErrorKind::kPeerFailed), "died: connection closed"));
        CHECK(ms_since(start) < 1000, "%ld ms", ms_since(start));
      },
      true);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
