// The bell of one endpoint, and the thread that drives what nobody waits for.
#include <future>

#include "check.h"
#include "engine/operation.h"
#include "engine/progress_engine.h"
#include "sync/waiter.h"

using namespace pycoll;
using namespace pycoll::test;

namespace {

using std::chrono::milliseconds;
constexpr milliseconds kLong{20000};

int64_t ms_since(int64_t start_ns) { return (now_ns() - start_ns) / 1'000'000; }

template <class Condition>
bool comes_true(const Condition& condition, milliseconds patience = kLong) {
  const Deadline deadline = Deadline::after(patience);
  while (!condition() && !deadline.passed())
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  return condition();
}

// Has an operation while `work` is not zero, and needs `signal` to reach `target` before it can go on.
class FakeDriver final : public Driver {
 public:
  void progress() override {
    passes.fetch_add(1);
    if (on_progress) on_progress();
    if (signal.load() >= target && work.load() > 0) work.fetch_sub(1);
  }
  void check() override { checks.fetch_add(1); }
  bool watch(std::vector<Wait>* waits) const override {
    if (work.load() == 0) return false;
    waits->push_back(Wait{&signal, target, 0});
    return true;
  }

  void pending_events(std::vector<Event>*) const override {}

  std::function<void()> on_progress;
  std::atomic<int> passes{0}, checks{0}, work{0};
  std::atomic<uint64_t> signal{0};
  uint64_t target = 0;
};

struct Engine {
  std::shared_ptr<Endpoint> endpoint = Endpoint::create(size_t{16} << 20);
  ProgressEngine engine{endpoint};
};

// Holds the engine's thread inside progress() until it is opened.
struct Gate {
  std::promise<void> entered, opened;
  void pass() {
    if (used.exchange(true)) return;
    entered.set_value();
    opened.get_future().wait();
  }
  std::atomic<bool> used{false};
};

}  // namespace

// ---- the bell

TEST(sleeper_is_woken_by_a_ring_and_by_nothing_else) {
  Bell bell{};
  std::atomic<bool> arrived{false};
  // It looks when others can see that it is about to sleep, not before: whoever posts after the look then rings.
  bell.sleep_unless(
      [&] {
        CHECK(bell.sleepers.load() == 1);
        return true;
      },
      kLong);
  int64_t start = now_ns();
  bell.sleep_unless([&] { return arrived.load(); }, milliseconds(30));
  CHECK(ms_since(start) >= 29, "%ld ms", ms_since(start));
  std::thread poster([&] {
    comes_true([&] { return bell.sleepers.load() != 0; });
    arrived = true;
    bell.ring_sleepers();
  });
  start = now_ns();
  bell.sleep_unless([&] { return arrived.load(); }, kLong);
  CHECK(ms_since(start) < kLong.count() && bell.rings.load() == 1 && bell.sleepers.load() == 0);
  poster.join();
  start = now_ns();
  bell.sleep_unless([&] { return arrived.load(); }, kLong);  // has arrived: does not sleep
  CHECK(ms_since(start) < 1000);
  bell.ring_sleepers();
  CHECK(bell.rings.load() == 1, "nobody sleeps, so nobody is rung");
}

// An operation that ends wakes whoever waits for it: each wake-up that gets lost costs the sleeper its whole slice.
TEST(end_of_an_operation_wakes_its_waiter) {
  Bell bell{};
  constexpr int kRounds = 50000;
  std::vector<std::unique_ptr<Operation>> operations;
  for (int i = 0; i < kRounds; ++i) operations.push_back(std::make_unique<Operation>(kLong));
  alignas(64) std::atomic<int> turn{-1};
  std::thread driver([&] {
    for (int i = 0; i < kRounds; ++i) {
      while (turn.load(std::memory_order_acquire) < i) cpu_relax();
      operations[static_cast<size_t>(i)]->finish(nullptr);
      bell.ring_sleepers();
    }
  });
  int slow = 0;
  for (int i = 0; i < kRounds && slow < 4; ++i) {
    Operation& operation = *operations[static_cast<size_t>(i)];
    turn.store(i, std::memory_order_release);
    for (int pause = i % 100; pause > 0; --pause) cpu_relax();
    const int64_t start = now_ns();
    while (!operation.finished())
      bell.sleep_unless([&] { return operation.finished(); }, milliseconds(50));
    // A machine that is busy otherwise may keep a thread from running for so long, but not often.
    if (ms_since(start) >= 50) ++slow;
  }
  turn.store(kRounds);
  driver.join();
  CHECK(slow < 4, "%d sleepers were not woken", slow);
}

// ---- the progress engine

TEST(engine_drives_until_nothing_is_left) {
  Engine e;
  const auto driver = std::make_shared<FakeDriver>();
  driver->work = 5;
  e.engine.activate(driver);
  CHECK(comes_true([&] { return driver->work.load() == 0; }));
  const int passes = driver->passes.load();
  std::this_thread::sleep_for(milliseconds(120));
  CHECK(driver->passes.load() <= passes + 1, "has nothing to do, and still %d passes",
        driver->passes.load() - passes);
  driver->work = 1;
  e.engine.activate(driver);
  CHECK(comes_true([&] { return driver->work.load() == 0; }));
}

TEST(engine_sleeps_until_a_signal_comes) {
  Engine e;
  const auto driver = std::make_shared<FakeDriver>();
  driver->work = 1;
  driver->target = 7;
  e.engine.activate(driver);
  CHECK(comes_true([&] { return driver->checks.load() >= 2; }),
        "looks at deadlines and peers now and then");
  CHECK(driver->passes.load() < 100, "%d passes: it does not sleep", driver->passes.load());
  const int64_t start = now_ns();
  driver->signal.store(7, std::memory_order_seq_cst);
  e.endpoint->bell()->ring_sleepers();
  CHECK(comes_true([&] { return driver->work.load() == 0; }));
  CHECK(ms_since(start) < 1000);
}

TEST(engine_keeps_out_while_somebody_waits) {
  Engine e;
  const auto driver = std::make_shared<FakeDriver>();
  driver->work = 1;
  driver->waiters = 1;
  e.engine.activate(driver);
  std::this_thread::sleep_for(milliseconds(50));
  CHECK(driver->passes.load() == 0);
  driver->waiters = 0;
  e.engine.activate(driver);
  CHECK(comes_true([&] { return driver->work.load() == 0; }));
}

TEST(engine_does_not_drive_what_was_removed) {
  Engine e;
  const auto first = std::make_shared<FakeDriver>(), second = std::make_shared<FakeDriver>();
  Gate gate;
  first->work = second->work = 1;
  first->target = second->target = 1;
  first->on_progress = [&gate] { gate.pass(); };
  second->waiters = 1;  // not yet
  e.engine.activate(second);
  e.engine.activate(first);
  gate.entered.get_future().wait();
  second->waiters = 0;
  e.engine.activate(second);
  const int passes = second->passes.load();
  e.engine.remove(second.get());
  gate.opened.set_value();
  std::this_thread::sleep_for(milliseconds(150));
  CHECK(second->passes.load() == passes, "driven after remove() had returned");
  e.engine.remove(first.get());
}

TEST(engine_remove_waits_for_the_pass_in_progress) {
  Engine e;
  const auto driver = std::make_shared<FakeDriver>();
  Gate gate;
  driver->work = 1;
  driver->on_progress = [&gate] { gate.pass(); };
  e.engine.activate(driver);
  gate.entered.get_future().wait();
  auto removed = std::async(std::launch::async, [&] { e.engine.remove(driver.get()); });
  CHECK(removed.wait_for(milliseconds(50)) == std::future_status::timeout);
  gate.opened.set_value();
  CHECK(removed.wait_for(kLong) == std::future_status::ready);
}

TEST(engine_starts_again_after_a_stop) {
  Engine e;
  const auto driver = std::make_shared<FakeDriver>();
  e.engine.stop();
  for (int i = 0; i < 20; ++i) {
    driver->work = 1;
    e.engine.activate(driver);
    CHECK(comes_true([&] { return driver->work.load() == 0; }));
    e.engine.stop();
  }
}

// At the end of a program one thread stops the engine while another still leaves a wait, and activates it.
TEST(engine_ends_though_it_is_activated_meanwhile) {
  auto* e = new Engine;  // kept if the test fails, since its threads then go on
  const auto first = std::make_shared<FakeDriver>(), second = std::make_shared<FakeDriver>();
  Gate gate;
  first->on_progress = [&gate] { gate.pass(); };
  e->engine.activate(first);
  gate.entered.get_future().wait();
  std::packaged_task<void()> stop([e] { e->engine.stop(); });
  std::future<void> stopped = stop.get_future();
  std::thread stopper(std::move(stop));
  std::this_thread::sleep_for(milliseconds(50));
  second->work = 1;
  second->target = 1;
  e->engine.activate(second);
  gate.opened.set_value();
  const bool ended = stopped.wait_for(milliseconds(5000)) == std::future_status::ready;
  CHECK(ended, "stop() does not return");
  if (!ended) {
    stopper.detach();
    return;
  }
  stopper.join();
  second->signal = 1;
  e->engine.activate(second);
  CHECK(comes_true([&] { return second->work.load() == 0; }));
  delete e;
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
