#include "weak_memory.h"

#include <algorithm>
#include <cstring>

#include "scheduler.h"

namespace pycoll::sim {

void join(VectorClock& into, const VectorClock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

void View::start(int own_index, const VectorClock& known) {
  index = own_index;
  seen = known;
  if (seen.size() <= static_cast<size_t>(index)) seen.resize(static_cast<size_t>(index) + 1);
  tick();
}

// ---- ordered accesses

namespace {
// Of each cell. More would only make old values older.
constexpr size_t kMaxMessages = 6;
// Chance that a load looks for something other than the newest value.
constexpr int kOldValuePercent = 25;
}  // namespace

WeakMemory::Cell& WeakMemory::cell(uintptr_t address) {
  Cell& cell = cells_[address];
  if (cell.messages.empty()) {
    uint32_t word;
    std::memcpy(&word, reinterpret_cast<const void*>(address), sizeof(word));
    cell.messages.push_back({word, -1, 0, 0, nullptr});
  }
  return cell;
}

uint64_t& WeakMemory::last_seen(Cell& cell, int thread) {
  for (auto& [who, stamp] : cell.last_seen)
    if (who == thread) return stamp;
  return cell.last_seen.emplace_back(thread, 0).second;
}

size_t WeakMemory::oldest_allowed(Cell& cell, const View& view) {
  const uint64_t seen = last_seen(cell, view.index);
  for (size_t i = cell.messages.size(); i-- > 0;) {
    const Message& message = cell.messages[i];
    const bool is_known = message.writer < 0 || view.knows(message.writer, message.writer_time);
    if (message.stamp <= seen || is_known) return i;
  }
  return 0;
}

void WeakMemory::observe(Cell& cell, size_t index, View& view, bool acquires) {
  const Message& message = cell.messages[index];
  uint64_t& seen = last_seen(cell, view.index);
  seen = std::max(seen, message.stamp);
  if (acquires && message.handed_on) join(view.seen, *message.handed_on);
}

void WeakMemory::store(View& view, const uintptr_t* addresses, const uint32_t* words,
                       size_t num_cells, Order order) {
  std::shared_ptr<const VectorClock> handed_on;
  if (order == Order::kRelease) handed_on = std::make_shared<VectorClock>(view.seen);
  const uint64_t stamp = next_stamp_++;
  for (size_t i = 0; i < num_cells; ++i) {
    Cell& target = cell(addresses[i]);
    target.messages.push_back({words[i], view.index, view.now(), stamp, handed_on});
    if (target.messages.size() > kMaxMessages) target.messages.pop_front();
    last_seen(target, view.index) = stamp;
    std::memcpy(reinterpret_cast<void*>(addresses[i]), &words[i], kCellBytes);
  }
  if (order == Order::kRelease) view.tick();
}

void WeakMemory::load(View& view, const uintptr_t* addresses, uint32_t* words, size_t num_cells,
                      Order order, bool newest, Random& random) {
  // The moment is a stamp: each cell gives the last word written by then.
  uint64_t earliest = 0, latest = 0;
  for (size_t i = 0; i < num_cells; ++i) {
    Cell& source = cell(addresses[i]);
    earliest = std::max(earliest, source.messages[oldest_allowed(source, view)].stamp);
    latest = std::max(latest, source.messages.back().stamp);
  }
  uint64_t moment = latest;
  if (!newest && latest > earliest && random.chance(kOldValuePercent)) {
    const auto& messages = cell(addresses[random.below(num_cells)]).messages;
    moment = std::max(earliest, messages[random.below(messages.size())].stamp);
  }
  for (size_t i = 0; i < num_cells; ++i) {
    Cell& source = cell(addresses[i]);
    size_t message = source.messages.size() - 1;
    while (message > 0 && source.messages[message].stamp > moment) --message;
    words[i] = source.messages[message].word;
    observe(source, message, view, order == Order::kAcquire);
  }
}

uint32_t WeakMemory::fetch_add(View& view, uintptr_t address, uint32_t addend) {
  Cell& target = cell(address);
  const Message newest = target.messages.back();
  observe(target, target.messages.size() - 1, view, false);
  const uint32_t after = newest.word + addend;
  store(view, &address, &after, 1, Order::kRelaxed);
  // Whoever acquires the sum acquires what a release before it has handed on.
  target.messages.back().handed_on = newest.handed_on;
  return newest.word;
}

void WeakMemory::synchronise(const std::vector<Thread*>& threads) {
  if (!Scheduler::current()->is_weak()) return;
  VectorClock all;
  for (const Thread* thread : threads) join(all, thread->view.seen);
  for (Thread* thread : threads) {
    thread->view.seen = all;
    thread->view.tick();
  }
}

// ---- races

bool RaceDetector::is_apart(const View& view, const Event& event) {
  return event.thread >= 0 && event.thread != view.index && !view.knows(event.thread, event.time);
}

std::optional<int> RaceDetector::check(const View& view, Byte& byte, Access access) {
  const bool is_plain = access == Access::kPlainLoad || access == Access::kPlainStore;
  const bool is_store = access == Access::kPlainStore || access == Access::kOrderedStore;
  if (is_apart(view, byte.plain_store)) return byte.plain_store.thread;
  if (is_plain && is_apart(view, byte.ordered_store)) return byte.ordered_store.thread;
  if (is_store) {
    for (const Event& load : byte.plain_loads)
      if (is_apart(view, load)) return load.thread;
    byte.plain_loads.clear();
    (is_plain ? byte.plain_store : byte.ordered_store) = {view.index, view.now()};
  } else if (is_plain) {
    for (Event& load : byte.plain_loads) {
      if (load.thread != view.index) continue;
      load.time = view.now();
      return std::nullopt;
    }
    byte.plain_loads.push_back({view.index, view.now()});
  }
  return std::nullopt;
}

std::optional<int> RaceDetector::check(const View& view, uintptr_t address, size_t nbytes,
                                       Access access) {
  for (uintptr_t at = address; at < address + nbytes; ++at) {
    const auto other = check(view, bytes_[at / kPageBytes][at % kPageBytes], access);
    if (other) return other;
  }
  return std::nullopt;
}

}  // namespace pycoll::sim
