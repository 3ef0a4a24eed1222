// Every collective in many small blocks, so that each slot of the staging is used again and again, with pauses that put the
// ranks out of step. Values, guard bytes, and what a race detector sees.
#include <cstdlib>
#include <random>

#include "guarded.h"
#include "ranks.h"

using namespace pycoll;
using namespace pycoll::test;

namespace {

constexpr std::chrono::milliseconds kTimeout{60000};

using Array = Guarded<int32_t>;

// Differs from call to call: what a block left behind in an earlier operation must not pass for the right one.
int32_t value(size_t i, int rank, int chunk, int call) {
  return static_cast<int32_t>(i * 2654435761u +
                              static_cast<size_t>(rank * 7919 + chunk * 104729 + call * 1299709)) >>
         8;
}

struct Case {
  Communicator& comm;
  size_t numel;
  int root, call;

  size_t world() const { return static_cast<size_t>(comm.world_size()); }
  size_t me() const { return static_cast<size_t>(comm.rank()); }
  bool is_root() const { return comm.rank() == root; }
};

Request request_of(Collective collective, const Case& c) {
  Request request;
  request.collective = collective;
  request.dtype = DType::kInt32;
  request.root = c.root;
  request.numel = c.numel;
  return request;
}

// A tensor of `chunks` chunks of `numel` elements. What lies in chunk k is value(i, rank, k, call), or -1 without a rank.
struct Tensor {
  Tensor(size_t chunks, size_t numel, int rank, int call)
      : array(chunks * numel), chunk_numel(numel) {
    for (size_t i = 0; i < chunks * numel; ++i) {
      array[i] = rank < 0 ? -1 : value(i % numel, rank, static_cast<int>(i / numel), call);
    }
  }
  void add_to(ChunkView* view) {
    for (size_t begin = 0; begin < array.numel(); begin += chunk_numel)
      view->add_chunk(array.data() + begin, chunk_numel);
    if (array.numel() == 0) view->add_chunk(array.data(), 0);
  }
  // expected(i, chunk) for each element.
  template <class Expected>
  void check(const Case& c, const char* what, const Expected& expected) {
    size_t wrong = 0;
    for (size_t i = 0; i < array.numel(); ++i) {
      wrong += array[i] != expected(i % chunk_numel, static_cast<int>(i / chunk_numel));
    }
    CHECK(wrong == 0, "%s, n=%zu rank=%zu root=%d numel=%zu call=%d %s: %zu wrong", what, c.world(),
          c.me(), c.root, c.numel, c.call, c.comm.algorithm().c_str(), wrong);
    CHECK(array.intact(), "%s, n=%zu numel=%zu: wrote beyond the end", what, c.world(), c.numel);
  }
  Array array;
  size_t chunk_numel;
};

int32_t sum(const Case& c, size_t i, int chunk) {
  uint32_t total = 0;
  for (int r = 0; r < c.comm.world_size(); ++r)
    total += static_cast<uint32_t>(value(i, r, chunk, c.call));
  return static_cast<int32_t>(total);
}

void check_all_reduce(const Case& c) {
  Tensor x(1, c.numel, c.comm.rank(), c.call);
  Request request = request_of(Collective::kAllReduce, c);
  x.add_to(&request.input);
  x.add_to(&request.output);
  c.comm.run(request, kTimeout);
  x.check(c, "all_reduce", [&](size_t i, int) { return sum(c, i, 0); });
}

void check_reduce(const Case& c) {
  Tensor x(1, c.numel, c.comm.rank(), c.call);
  Request request = request_of(Collective::kReduce, c);
  x.add_to(&request.input);
  if (c.is_root()) x.add_to(&request.output);
  c.comm.run(request, kTimeout);
  x.check(c, "reduce", [&](size_t i, int) {
    return c.is_root() ? sum(c, i, 0) : value(i, c.comm.rank(), 0, c.call);
  });
}

void check_all_gather(const Case& c) {
  Tensor in(1, c.numel, c.comm.rank(), c.call), out(c.world(), c.numel, -1, c.call);
  Request request = request_of(Collective::kAllGather, c);
  in.add_to(&request.input);
  out.add_to(&request.output);
  c.comm.run(request, kTimeout);
  out.check(c, "all_gather", [&](size_t i, int chunk) { return value(i, chunk, 0, c.call); });
}

void check_reduce_scatter(const Case& c) {
  Tensor in(c.world(), c.numel, c.comm.rank(), c.call), out(1, c.numel, -1, c.call);
  Request request = request_of(Collective::kReduceScatter, c);
  in.add_to(&request.input);
  out.add_to(&request.output);
  c.comm.run(request, kTimeout);
  out.check(c, "reduce_scatter", [&](size_t i, int) { return sum(c, i, c.comm.rank()); });
}

void check_broadcast(const Case& c) {
  Tensor x(1, c.numel, c.is_root() ? c.root : -1, c.call);
  Request request = request_of(Collective::kBroadcast, c);
  x.add_to(&request.input);
  x.add_to(&request.output);
  c.comm.run(request, kTimeout);
  x.check(c, "broadcast", [&](size_t i, int) { return value(i, c.root, 0, c.call); });
}

void check_gather(const Case& c) {
  Tensor in(1, c.numel, c.comm.rank(), c.call),
      out(c.is_root() ? c.world() : 0, c.numel, -1, c.call);
  Request request = request_of(Collective::kGather, c);
  in.add_to(&request.input);
  if (c.is_root()) out.add_to(&request.output);
  c.comm.run(request, kTimeout);
  out.check(c, "gather", [&](size_t i, int chunk) { return value(i, chunk, 0, c.call); });
}

void check_scatter(const Case& c) {
  Tensor in(c.is_root() ? c.world() : 0, c.numel, c.comm.rank(), c.call),
      out(1, c.numel, -1, c.call);
  Request request = request_of(Collective::kScatter, c);
  if (c.is_root()) in.add_to(&request.input);
  out.add_to(&request.output);
  c.comm.run(request, kTimeout);
  out.check(c, "scatter", [&](size_t i, int) { return value(i, c.root, c.comm.rank(), c.call); });
}

void check_all_to_all(const Case& c) {
  Tensor in(c.world(), c.numel, c.comm.rank(), c.call), out(c.world(), c.numel, -1, c.call);
  Request request = request_of(Collective::kAllToAll, c);
  in.add_to(&request.input);
  out.add_to(&request.output);
  c.comm.run(request, kTimeout);
  out.check(c, "all_to_all",
            [&](size_t i, int chunk) { return value(i, chunk, c.comm.rank(), c.call); });
}

// From src to dst go as many elements as this says; to some none.
size_t uneven_numel(const Case& c, int src, int dst) {
  return (c.numel * static_cast<size_t>(src + 2 * dst)) % (c.numel + 3);
}

void check_uneven_all_to_all(const Case& c) {
  Request request = request_of(Collective::kAllToAll, c);
  request.numel = 0;
  std::vector<Tensor> in, out;
  for (int r = 0; r < c.comm.world_size(); ++r) {
    in.emplace_back(1, uneven_numel(c, c.comm.rank(), r), c.comm.rank(), c.call + r);
    out.emplace_back(1, uneven_numel(c, r, c.comm.rank()), -1, c.call);
  }
  for (Tensor& tensor : in) request.input.add_chunk(tensor.array.data(), tensor.array.numel());
  for (Tensor& tensor : out) request.output.add_chunk(tensor.array.data(), tensor.array.numel());
  c.comm.run(request, kTimeout);
  for (int r = 0; r < c.comm.world_size(); ++r) {
    out[static_cast<size_t>(r)].check(c, "uneven all_to_all", [&](size_t i, int) {
      return value(i, r, 0, c.call + c.comm.rank());
    });
  }
}

constexpr void (*kChecks[])(const Case&) = {
    check_all_reduce, check_reduce,  check_all_gather, check_reduce_scatter,   check_broadcast,
    check_gather,     check_scatter, check_all_to_all, check_uneven_all_to_all};

// With 4 KiB a slot: some sizes beside the signal, some of one block, some of many.
constexpr size_t kNumels[] = {5, 1, 16, 17, 1024, 1025, 9001, 20011};

}  // namespace

TEST(every_collective_in_small_blocks) {
  for (const int n : {2, 3, 4}) {
    for (const char* algorithm : {"auto", "one_shot", "ring"}) {
      run_ranks(
          n,
          [](Communicator& comm) {
            std::mt19937 random(static_cast<unsigned>(comm.rank()));
            int call = 0;
            for (const size_t numel : kNumels) {
              for (const auto check : kChecks) {
                if (random() % 6 == 0)
                  std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
                check(Case{comm, numel, call % comm.world_size(), call});
                ++call;
              }
            }
          },
          RankOptions{algorithm});
    }
  }
}

// The same on tensors that peers map, straight from one to another.
TEST(every_collective_between_mapped_tensors) {
  use_memory_path("mapped");
  for (const int n : {2, 3, 4}) {
    run_runtimes(n, [](Rank& rank) {
      const std::shared_ptr<Communicator> comm = rank.make_group();
      t_heap = &rank.runtime()->endpoint->heap();
      std::mt19937 random(static_cast<unsigned>(rank.rank()));
      int call = 0;
      for (const size_t numel : kNumels) {
        for (const auto check : kChecks) {
          if (random() % 6 == 0)
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
          check(Case{*comm, numel, call % comm->world_size(), call});
          ++call;
          const std::string path = comm->events().back().memory_path;
          const bool is_all_to_all = check == check_all_to_all || check == check_uneven_all_to_all;
          // With so little beside the signal there is no room for its addresses.
          if (numel > 16 && !is_all_to_all) CHECK(path == "mapped", "%s", path.c_str());
        }
      }
      t_heap = nullptr;
      comm->close(std::chrono::milliseconds(1000));
    });
  }
  use_memory_path("staged");
}

// One rank's tensors are mapped, the others' are not: all are staged.
TEST(mapped_and_plain_tensors_together) {
  use_memory_path("mapped");
  run_runtimes(3, [](Rank& rank) {
    const std::shared_ptr<Communicator> comm = rank.make_group();
    t_heap = rank.rank() == 1 ? &rank.runtime()->endpoint->heap() : nullptr;
    int call = 0;
    for (const auto check : kChecks) {
      check(Case{*comm, 9001, call % 3, call});
      CHECK(std::string(comm->events().back().memory_path) == "staged");
      ++call;
    }
    t_heap = nullptr;
    comm->close(std::chrono::milliseconds(1000));
  });
  use_memory_path("staged");
}

// Through the kernel, also between threads of one process; with tensors above the limit for it.
TEST(every_collective_through_the_kernel) {
  use_memory_path("auto");
  run_runtimes(3, [](Rank& rank) {
    const std::shared_ptr<Communicator> comm = rank.make_group();
    t_heap = rank.rank() == 2 ? &rank.runtime()->endpoint->heap() : nullptr;
    int call = 0;
    for (const auto check : kChecks) {
      check(Case{*comm, 100003, call % 3, call});
      const bool is_other = check == check_all_to_all || check == check_uneven_all_to_all ||
                            check == check_reduce_scatter;
      if (!is_other) CHECK(std::string(comm->events().back().memory_path) == "readv");
      ++call;
    }
    t_heap = nullptr;
    comm->close(std::chrono::milliseconds(1000));
  });
  use_memory_path("staged");
}

TEST(the_same_collective_again_and_again) {
  for (const auto check : kChecks) {
    run_ranks(3, [check](Communicator& comm) {
      for (int call = 0; call < 12; ++call)
        check(Case{comm, 4099 + static_cast<size_t>(call), call % 3, call});
    });
  }
}

TEST(uneven_chunks_that_do_not_fit_are_named) {
  run_ranks(2, [](Communicator& comm) {
    int32_t data[16] = {};
    Request request;
    request.collective = Collective::kAllToAll;
    request.dtype = DType::kInt32;
    request.input.add_chunk(data, 3);
    request.input.add_chunk(data + 4, 2);
    request.output.add_chunk(data + 8, 3);
    request.output.add_chunk(data + 12, comm.rank() == 0 ? 3 : 2);
    std::string text;
    try {
      comm.run(request, kTimeout);
    } catch (const Error& error) {
      text = error.what();
      CHECK(error.kind() == ErrorKind::kMismatch);
    }
    CHECK(!text.empty(), "nothing was raised");
    CHECK(comm.failure().empty());
    check_all_reduce(Case{comm, 100, 0, 1});
  });
}

int main(int argc, char** argv) {
  setenv("PYCOLL_STAGING_BYTES", "4096", 1);
  setenv("PYCOLL_PAYLOAD_BYTES", "64", 1);
  return run_tests(argc, argv);
}
