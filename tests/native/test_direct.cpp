// Direct access to tensors of others where something goes wrong: who gives up, who must not begin, whom the error names.
#include <atomic>

#include "collectives/group.h"
#include "engine/signal_pads.h"
#include "ranks.h"

using namespace pycoll;
using namespace pycoll::test;

namespace {

constexpr std::chrono::milliseconds kTimeout{60000};
constexpr size_t kNumel = 100003;

// An all_reduce on memory of this rank's heap.
struct Call {
  explicit Call(Rank& rank)
      : heap(rank.runtime()->endpoint->heap()),
        data(reinterpret_cast<int32_t*>(heap.allocate(kNumel * sizeof(int32_t)))) {
    std::fill_n(data, kNumel, rank.rank() + 1);
    request.collective = Collective::kAllReduce;
    request.dtype = DType::kInt32;
    request.numel = kNumel;
    request.input.add_chunk(data, kNumel);
    request.output.add_chunk(data, kNumel);
  }
  ~Call() { heap.release(reinterpret_cast<std::byte*>(data)); }

  SharedHeap& heap;
  int32_t* const data;
  Request request;
};

std::string text_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was raised";
}

void until(const std::atomic<bool>& flag) {
  while (!flag) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

// Rank 1 is in the middle of an access while rank 0 aborts: rank 0 gets its memory back when rank 1 has ended.
TEST(who_gives_up_waits_for_those_that_touch_its_tensor) {
  use_memory_path("mapped");
  std::atomic<bool> touches{false}, ended{false}, gave_up{false};
  run_runtimes(2, [&](Rank& rank) {
    const std::shared_ptr<Communicator> comm = rank.make_group();
    Call call(rank);
    if (rank.rank() == 0) {
      until(touches);
      const std::shared_ptr<Operation> operation = comm->start(call.request, kTimeout);
      // One that has not begun has shown its tensor to nobody, and ends at once.
      CHECK(!comm->wait(operation, Deadline::after(std::chrono::milliseconds(10))));
      comm->abort("rank 0 wants no more");
      CHECK(ended, "the operation ended while another rank touched the tensor");
      CHECK(operation->finished() && operation->error() != nullptr);
      gave_up = true;
      return;
    }
    {
      const Group::Touching touching(*comm->group());
      touches = true;
      std::string text = "nothing was raised";
      while (text == "nothing was raised") text = text_of([&] { touching.check(); });
      CHECK(contains(text, "rank 0 wants no more"), "%s", text.c_str());
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      CHECK(!gave_up);
      ended = true;
    }
    until(gave_up);
  });
  use_memory_path("staged");
}

TEST(nobody_begins_after_a_member_has_given_up) {
  use_memory_path("mapped");
  std::atomic<bool> aborted{false};
  std::atomic<int> tried{0};
  // Who has left could be named instead.
  const auto until_all_have_tried = [&] {
    while (tried < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  run_runtimes(3, [&](Rank& rank) {
    const std::shared_ptr<Communicator> comm = rank.make_group();
    if (rank.rank() == 2) {
      comm->abort("rank 2 wants no more");
      aborted = true;
      until_all_have_tried();
      return;
    }
    until(aborted);
    const std::string text = text_of([&] { Group::Touching touching(*comm->group()); });
    CHECK(contains(text, "rank 2") && contains(text, "wants no more"), "%s", text.c_str());
    CHECK(comm->group()->member(rank.rank()).page->touching.load() == 0);
    ++tried;
    until_all_have_tried();
  });
  use_memory_path("staged");
}

// Who never ends its access is named after a while; the operation ends all the same.
TEST(who_stops_in_the_middle_is_named) {
  use_memory_path("mapped");
  std::atomic<bool> touches{false}, gave_up{false};
  run_runtimes(2, [&](Rank& rank) {
    const std::shared_ptr<Communicator> comm = rank.make_group();
    Call call(rank);
    if (rank.rank() == 1) {
      const Group::Touching touching(*comm->group());
      touches = true;
      until(gave_up);
      return;
    }
    until(touches);
    const std::string text =
        text_of([&] { comm->run(call.request, std::chrono::milliseconds(300)); });
    CHECK(contains(text, "Timed out waiting 300 ms for rank 1"), "%s", text.c_str());
    CHECK(contains(text, "rank 1 stopped in the middle of an access"), "%s", text.c_str());
    gave_up = true;
  });
  use_memory_path("staged");
}

// A word is taken once, whatever a waiter looks at; what was written before a signal is seen after it.
TEST(signals_order_plain_memory) {
  std::vector<uint32_t> words[3];
  std::vector<void*> pads;
  for (auto& pad : words) {
    pad.assign(2 * 3, 0);
    pads.push_back(pad.data());
  }
  int values[3] = {};
  run_runtimes(3, [&](Rank& rank) {
    const std::shared_ptr<Communicator> comm = rank.make_group();
    const SignalPads signals(comm, pads, words[0].size() * sizeof(uint32_t));
    const int me = rank.rank(), after = (me + 1) % 3, before = (me + 2) % 3;
    for (int turn = 0; turn < 500; ++turn) {
      values[after] = turn * 10 + me;
      signals.put(after, 1, kTimeout);
      signals.wait(before, 1, kTimeout);
      CHECK(values[me] == turn * 10 + before);
      signals.barrier(0, kTimeout);
    }
    comm->close(std::chrono::milliseconds(1000));
  });
  for (const auto& pad : words)
    CHECK(std::all_of(pad.begin(), pad.end(), [](uint32_t word) { return word == 0; }));
}

// One rank gives up while the others come later: without a trace of it, they would leave before it has come again.
TEST(a_failed_barrier_breaks_its_channel) {
  std::vector<uint32_t> words[3];
  std::vector<void*> pads;
  for (auto& pad : words) {
    pad.assign(2 * 3, 0);
    pads.push_back(pad.data());
  }
  std::atomic<bool> gave_up{false};
  run_runtimes(3, [&](Rank& rank) {
    const std::shared_ptr<Communicator> comm = rank.make_group();
    const SignalPads signals(comm, pads, words[0].size() * sizeof(uint32_t));
    const auto text = [&](std::chrono::milliseconds timeout) {
      return text_of([&] { signals.barrier(1, timeout); });
    };
    if (rank.rank() == 2) {
      CHECK(contains(text(std::chrono::milliseconds(50)), "Timed out"));
      gave_up = true;
    }
    until(gave_up);
    for (int turn = 0; turn < 2; ++turn) {
      const std::string said = text(kTimeout);
      CHECK(contains(said, "channel 1 of this symmetric memory is broken"), "%s", said.c_str());
    }
    signals.barrier(0, kTimeout);
    comm->close(std::chrono::milliseconds(1000));
  });
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
