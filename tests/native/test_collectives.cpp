// Collectives among ranks that are threads: values, guard bytes, bytes moved. Runs plain, under ThreadSanitizer and under
// AddressSanitizer with UndefinedBehaviorSanitizer.
#include <random>

#include "guarded.h"
#include "ranks.h"
#include "topology/ring.h"

using namespace pycoll;
using namespace pycoll::test;

namespace {

constexpr std::chrono::milliseconds kTimeout{60000};

// Depends on position and rank; sums of up to 8 ranks are exact in float32.
float value(size_t i, int rank) {
  return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 251);
}

Request all_reduce(float* data, size_t numel, ReduceOp op) {
  Request request;
  request.collective = Collective::kAllReduce;
  request.dtype = DType::kFloat32;
  request.op = op;
  request.numel = numel;
  request.input.add_chunk(data, numel);
  request.output.add_chunk(data, numel);
  return request;
}

void check_all_reduce(Communicator& comm, size_t numel, bool async) {
  Guarded<float> x(numel);
  for (size_t i = 0; i < numel; ++i) x[i] = value(i, comm.rank());
  if (async) {
    auto operation = comm.start(all_reduce(x.data(), numel, ReduceOp::kSum), kTimeout);
    CHECK(comm.wait(operation, Deadline::never()));
    CHECK(operation->error() == nullptr);
  } else {
    comm.run(all_reduce(x.data(), numel, ReduceOp::kSum), kTimeout);
  }
  size_t wrong = 0;
  for (size_t i = 0; i < numel; ++i) {
    float sum = 0;
    for (int r = 0; r < comm.world_size(); ++r) sum += value(i, r);
    wrong += x[i] != sum;
  }
  CHECK(wrong == 0, "n=%d numel=%zu algorithm=%s: %zu wrong", comm.world_size(), numel,
        comm.algorithm().c_str(), wrong);
  CHECK(x.intact());
}

void check_all_gather(Communicator& comm, size_t numel) {
  const size_t n = static_cast<size_t>(comm.world_size());
  Guarded<float> in(numel), out(numel * n);
  for (size_t i = 0; i < numel; ++i) in[i] = value(i, comm.rank());
  Request request;
  request.collective = Collective::kAllGather;
  request.dtype = DType::kFloat32;
  request.numel = numel;
  request.input.add_chunk(in.data(), numel);
  for (size_t r = 0; r < n; ++r) request.output.add_chunk(out.data() + r * numel, numel);
  comm.run(std::move(request), kTimeout);
  size_t wrong = 0;
  for (size_t r = 0; r < n; ++r) {
    for (size_t i = 0; i < numel; ++i) wrong += out[r * numel + i] != value(i, static_cast<int>(r));
  }
  CHECK(wrong == 0, "n=%zu numel=%zu algorithm=%s: %zu wrong", n, numel, comm.algorithm().c_str(),
        wrong);
  CHECK(in.intact() && out.intact());
}

void check_reduce_scatter(Communicator& comm, size_t numel) {
  const size_t n = static_cast<size_t>(comm.world_size());
  Guarded<float> in(numel * n), out(numel);
  for (size_t i = 0; i < numel * n; ++i) in[i] = value(i, comm.rank());
  Request request;
  request.collective = Collective::kReduceScatter;
  request.dtype = DType::kFloat32;
  request.op = ReduceOp::kMax;
  request.numel = numel;
  for (size_t r = 0; r < n; ++r) request.input.add_chunk(in.data() + r * numel, numel);
  request.output.add_chunk(out.data(), numel);
  comm.run(std::move(request), kTimeout);
  size_t wrong = 0;
  for (size_t i = 0; i < numel; ++i) {
    float most = 0;
    for (int r = 0; r < comm.world_size(); ++r) {
      most = std::max(most, value(static_cast<size_t>(comm.rank()) * numel + i, r));
    }
    wrong += out[i] != most;
  }
  CHECK(wrong == 0, "n=%zu numel=%zu algorithm=%s: %zu wrong", n, numel, comm.algorithm().c_str(),
        wrong);
  CHECK(in.intact() && out.intact());
}

void check_broadcast(Communicator& comm, size_t numel, int root) {
  Guarded<float> x(numel);
  for (size_t i = 0; i < numel; ++i) x[i] = value(i, comm.rank());
  Request request;
  request.collective = Collective::kBroadcast;
  request.dtype = DType::kFloat32;
  request.root = root;
  request.numel = numel;
  request.input.add_chunk(x.data(), numel);
  request.output.add_chunk(x.data(), numel);
  comm.run(std::move(request), kTimeout);
  size_t wrong = 0;
  for (size_t i = 0; i < numel; ++i) wrong += x[i] != value(i, root);
  CHECK(wrong == 0, "n=%d numel=%zu root=%d: %zu wrong", comm.world_size(), numel, root, wrong);
  CHECK(x.intact());
}

constexpr size_t kSizes[] = {0, 1, 2, 3, 5, 1023, 4096, 4099, 65537, 131071, 300007};

}  // namespace

TEST(every_collective_and_algorithm) {
  for (int n : {2, 3, 4, 8}) {
    for (const char* algorithm : {"auto", "one_shot", "two_shot", "ring"}) {
      run_ranks(
          n,
          [](Communicator& comm) {
            for (size_t numel : kSizes) {
              if (comm.world_size() == 8 && numel > 100000) continue;
              check_all_reduce(comm, numel, numel % 2 == 0);
              check_all_gather(comm, numel);
              check_reduce_scatter(comm, numel);
              check_broadcast(comm, numel, static_cast<int>(numel) % comm.world_size());
            }
          },
          RankOptions{algorithm});
    }
  }
}

TEST(many_sizes_back_to_back_with_pauses) {
  for (int n : {2, 3, 4}) {
    run_ranks(n, [](Communicator& comm) {
      std::mt19937 random(static_cast<unsigned>(comm.rank()));
      for (int i = 0; i < 150; ++i) {
        const size_t sizes[] = {1, 4096, 7, 30011, 0, 33};
        check_all_reduce(comm, sizes[i % 6], i % 3 == 0);
        if (random() % 8 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      }
    });
  }
}

TEST(several_in_flight_complete_in_issue_order) {
  run_ranks(3, [](Communicator& comm) {
    Guarded<float> x(50021);
    for (size_t i = 0; i < x.numel(); ++i) x[i] = value(i, comm.rank());
    std::vector<std::shared_ptr<Operation>> operations;
    for (int i = 0; i < 3; ++i) {
      operations.push_back(comm.start(
          all_reduce(x.data(), x.numel(), i == 1 ? ReduceOp::kMax : ReduceOp::kSum), kTimeout));
    }
    for (size_t i = operations.size(); i-- > 0;) CHECK(comm.wait(operations[i], Deadline::never()));
    size_t wrong = 0;
    for (size_t i = 0; i < x.numel(); ++i) {
      float sum = 0;
      for (int r = 0; r < 3; ++r) sum += value(i, r);
      wrong += x[i] != 3 * sum;  // summed; the maximum of equal sums; summed again
    }
    CHECK(wrong == 0, "%zu wrong", wrong);
  });
}

TEST(sequence_numbers_pass_every_width) {
  for (uint64_t start : {(uint64_t{1} << 8) - 4, (uint64_t{1} << 16) - 4, (uint64_t{1} << 31) - 4,
                         (uint64_t{1} << 32) - 4}) {
    run_ranks(
        2,
        [](Communicator& comm) {
          for (int i = 0; i < 16; ++i) check_all_reduce(comm, 100 + static_cast<size_t>(i), false);
        },
        RankOptions{"auto", kTimeout, start, nullptr});
  }
}

TEST(ring_moves_the_bytes_that_theory_says) {
  for (int n : {2, 3, 4, 5}) {
    run_ranks(
        n,
        [](Communicator& comm) {
          const size_t numel = 200003;  // no multiple of any n: chunks are uneven
          check_all_reduce(comm, numel, false);
          const Event event = comm.events().back();
          CHECK(std::string(event.algorithm) == "ring");
          // Rank r sends chunks r - 1, r - 2, ... in the n - 1 steps of either half: all but its own, and all but r + 1.
          const size_t world = static_cast<size_t>(comm.world_size());
          const size_t me = static_cast<size_t>(comm.rank());
          const auto bytes = [&](size_t chunk) {
            return part(numel, world, chunk % world).numel * 4;
          };
          CHECK(event.bytes_written == 2 * numel * 4 - bytes(me) - bytes(me + 1),
                "n=%zu rank=%zu wrote %zu", world, me, event.bytes_written);
          CHECK(event.bytes_read == 2 * numel * 4 - bytes(me + world - 1) - bytes(me),
                "n=%zu rank=%zu read %zu", world, me, event.bytes_read);
        },
        RankOptions{"ring"});
  }
}

TEST(mismatch_raises_everywhere_and_the_group_stays_usable) {
  run_ranks(3, [](Communicator& comm) {
    Guarded<float> x(8);
    for (size_t i = 0; i < 8; ++i) x[i] = value(i, comm.rank());
    const size_t numel = comm.rank() == 2 ? 8 : 6;
    std::string text;
    try {
      comm.run(all_reduce(x.data(), numel, ReduceOp::kSum), kTimeout);
    } catch (const Error& error) {
      text = error.what();
      CHECK(error.kind() == ErrorKind::kMismatch);
    }
    CHECK(text.find("ranks 0, 1 called all_reduce(6 x float32, SUM)") != std::string::npos, "%s",
          text.c_str());
    CHECK(text.find("rank 2 called all_reduce(8 x float32, SUM)") != std::string::npos, "%s",
          text.c_str());
    for (size_t i = 0; i < 8; ++i) CHECK(x[i] == value(i, comm.rank()));
    check_all_reduce(comm, 100, false);
  });
}

TEST(refused_arguments_raise_everywhere) {
  run_ranks(2, [](Communicator& comm) {
    Guarded<float> x(4);
    std::string text;
    try {
      comm.run(all_reduce(x.data(), 4, comm.rank() == 1 ? ReduceOp::kBand : ReduceOp::kSum),
               kTimeout);
    } catch (const Error& error) {
      text = error.what();
      CHECK(error.kind() ==
            (comm.rank() == 1 ? ErrorKind::kInvalidArgument : ErrorKind::kMismatch));
    }
    CHECK(text.find("BAND has no meaning for dtype float32") != std::string::npos, "%s",
          text.c_str());
    check_all_reduce(comm, 10, false);
  });
}

TEST(a_missing_rank_is_named_at_the_deadline) {
  run_ranks(2, [](Communicator& comm) {
    Guarded<float> x(4);
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
    } else {
      std::string text;
      try {
        comm.run(all_reduce(x.data(), 4, ReduceOp::kSum), std::chrono::milliseconds(100));
      } catch (const Error& error) {
        text = error.what();
        CHECK(error.kind() == ErrorKind::kTimeout);
      }
      CHECK(text.find("Timed out waiting 100 ms for rank 1") != std::string::npos, "%s",
            text.c_str());
      CHECK(!comm.failure().empty());
    }
  });
}

TEST(a_rank_that_leaves_is_named) {
  run_ranks(3, [](Communicator& comm) {
    check_all_reduce(comm, 10, false);
    if (comm.rank() == 1) return;
    Guarded<float> x(4);
    std::string text;
    try {
      comm.run(all_reduce(x.data(), 4, ReduceOp::kSum), kTimeout);
    } catch (const Error& error) {
      text = error.what();
      CHECK(error.kind() == ErrorKind::kPeerFailed);
    }
    CHECK(text.find("rank 1 has left") != std::string::npos, "%s", text.c_str());
  });
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
