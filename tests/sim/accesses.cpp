#include "accesses.h"

namespace pycoll::sim {
namespace {

constexpr size_t kCell = WeakMemory::kCellBytes;
constexpr size_t kLineBytes = 128;
constexpr size_t kLineCells = kLineBytes / kCell;

}  // namespace

namespace {

uint64_t weak_load(const void* p, size_t nbytes, Order order, bool newest) {
  Scheduler& scheduler = *Scheduler::current();
  scheduler.check_race(p, nbytes, RaceDetector::Access::kOrderedLoad);
  const auto at = reinterpret_cast<uintptr_t>(p);
  const uintptr_t cells[2] = {at, at + kCell};
  uint32_t words[2] = {};
  scheduler.weak_memory().load(scheduler.self().view, cells, words, nbytes / kCell, order, newest,
                               scheduler.random());
  return words[0] | uint64_t{words[1]} << 32;
}

}  // namespace

uint64_t weak_load(const void* p, size_t nbytes, Order order) {
  return weak_load(p, nbytes, order, Scheduler::current()->must_read_newest());
}

uint64_t weak_newest(const void* p, size_t nbytes, Order order) {
  return weak_load(p, nbytes, order, true);
}

void weak_store(void* p, uint64_t x, size_t nbytes, Order order) {
  Scheduler& scheduler = *Scheduler::current();
  scheduler.check_race(p, nbytes, RaceDetector::Access::kOrderedStore);
  const auto at = reinterpret_cast<uintptr_t>(p);
  const uintptr_t cells[2] = {at, at + kCell};
  const uint32_t words[2] = {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
  scheduler.weak_memory().store(scheduler.self().view, cells, words, nbytes / kCell, order);
}

uint32_t weak_fetch_add(uint32_t* p, uint32_t x) {
  Scheduler& scheduler = *Scheduler::current();
  scheduler.check_race(p, sizeof(x), RaceDetector::Access::kOrderedStore);
  return scheduler.weak_memory().fetch_add(scheduler.self().view, reinterpret_cast<uintptr_t>(p),
                                           x);
}

void move_line(const std::vector<Thread*>& lanes, bool is_store) {
  Scheduler& scheduler = *Scheduler::current();
  auto* const line = static_cast<uint64_t*>(lanes.front()->exchange.address);
  if (!scheduler.is_weak()) {
    for (size_t i = 0; i < 16; ++i) {
      Exchange& exchange = lanes[i / 2]->exchange;
      if (is_store) {
        __atomic_store_n(line + i, exchange.given[i % 2], __ATOMIC_RELAXED);
      } else {
        exchange.taken[i % 2] = __atomic_load_n(line + i, __ATOMIC_RELAXED);
      }
    }
    return;
  }
  scheduler.check_race(
      line, kLineBytes,
      is_store ? RaceDetector::Access::kOrderedStore : RaceDetector::Access::kOrderedLoad);
  uintptr_t cells[kLineCells];
  uint32_t words[kLineCells];
  for (size_t i = 0; i < kLineCells; ++i) cells[i] = reinterpret_cast<uintptr_t>(line) + i * kCell;
  View& view = scheduler.self().view;
  if (is_store) {
    for (size_t i = 0; i < 8; ++i) std::memcpy(words + 4 * i, lanes[i]->exchange.given, 16);
    scheduler.weak_memory().store(view, cells, words, kLineCells, Order::kRelaxed);
  } else {
    scheduler.weak_memory().load(view, cells, words, kLineCells, Order::kRelaxed,
                                 scheduler.must_read_newest(), scheduler.random());
    for (size_t i = 0; i < 8; ++i) std::memcpy(lanes[i]->exchange.taken, words + 4 * i, 16);
  }
}

}  // namespace pycoll::sim
