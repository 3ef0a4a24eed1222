// The threads that run what hangs on the end of an operation.
#include <future>
#include <mutex>
#include <thread>

#include "check.h"
#include "engine/callback_pool.h"

using namespace pycoll;
using namespace pycoll::test;

namespace {

const auto kLong = std::chrono::milliseconds(20000);

bool comes(std::future<void>& future) {
  return future.wait_for(kLong) == std::future_status::ready;
}

}  // namespace

TEST(callbacks_begin_in_the_order_of_submission) {
  CallbackPool pool;
  std::mutex mutex;
  std::vector<int> order;
  for (int i = 0; i < 1009; ++i) {
    pool.submit([&, i] {
      std::lock_guard<std::mutex> lock(mutex);
      order.push_back(i);
    });
  }
  CHECK(pool.drain(Deadline::after(kLong)));
  CHECK(order.size() == 1009, "%zu ran", order.size());
  // One that is taken for blocked (a busy machine) may be overtaken at its lock by the next.
  int out_of_order = 0;
  for (size_t i = 0; i < order.size(); ++i) out_of_order += order[i] != static_cast<int>(i);
  CHECK(out_of_order < 100, "%d out of order", out_of_order);
}

// As a callback does that issues a collective whose other ranks first have to run theirs.
TEST(a_callback_may_wait_for_one_behind_it) {
  CallbackPool pool;
  constexpr int kDepth = 17;
  std::vector<std::promise<void>> opened(kDepth + 1);
  std::promise<void> all;
  for (int i = 0; i < kDepth; ++i) {
    pool.submit([&, i] {
      opened[static_cast<size_t>(i) + 1].get_future().wait();
      if (i == 0) {
        all.set_value();
      } else {
        opened[static_cast<size_t>(i)].set_value();
      }
    });
  }
  pool.submit([&] { opened[kDepth].set_value(); });
  std::future<void> done = all.get_future();
  CHECK(comes(done));
  CHECK(pool.drain(Deadline::after(kLong)));
}

TEST(a_callback_may_submit_another) {
  CallbackPool pool;
  std::promise<void> second;
  pool.submit([&] { pool.submit([&] { second.set_value(); }); });
  std::future<void> done = second.get_future();
  CHECK(comes(done));
  CHECK(pool.drain(Deadline::after(kLong)));
}

TEST(drain_gives_up_at_its_deadline) {
  CallbackPool pool;
  std::promise<void> opened;
  pool.submit([&] { opened.get_future().wait(); });
  CHECK(!pool.drain(Deadline::after(std::chrono::milliseconds(20))));
  opened.set_value();
  CHECK(pool.drain(Deadline::after(kLong)));
}

TEST(what_has_not_begun_when_the_pool_goes_is_let_go_without_a_run) {
  std::promise<void> entered, opened;
  std::shared_future<void> gate(opened.get_future());
  auto held = std::make_shared<int>(0);
  std::atomic<int> ran{0};
  {
    CallbackPool pool;
    // Both block, so that the third is still queued when the pool goes, or has become the third that blocks.
    for (int i = 0; i < 3; ++i) {
      pool.submit([&, gate, held, i] {
        ran.fetch_add(1);
        if (i == 0) entered.set_value();
        gate.wait();
      });
    }
    std::future<void> inside = entered.get_future();
    CHECK(comes(inside));
  }
  std::this_thread::sleep_for(
      std::chrono::milliseconds(20));  // what was taken before has begun now
  const int begun = ran.load();
  opened.set_value();
  const Deadline deadline = Deadline::after(kLong);
  while (held.use_count() > 1 && !deadline.passed()) std::this_thread::yield();
  CHECK(held.use_count() == 1, "%ld uses", held.use_count());
  CHECK(ran.load() == begun, "%d ran, %d had begun", ran.load(), begun);
}

// The last reference to a group, and with it the pool, may go in a callback.
TEST(a_callback_may_destroy_the_pool) {
  auto pool = std::make_shared<CallbackPool>();
  CallbackPool& alias = *pool;
  std::promise<void> gone;
  alias.submit([last = std::move(pool), &gone]() mutable {
    last.reset();
    gone.set_value();
  });
  std::future<void> done = gone.get_future();
  CHECK(comes(done));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
