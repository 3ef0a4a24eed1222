// Weak memory, by views. Words that are accessed with an order (relaxed, acquire, release, atoms, lines) keep their last values; a
// load may give any of them that its thread does not know to be overwritten. What a thread knows is a vector clock: one number for
// each thread, which grows with each release and rendezvous.
//
// Plain accesses have no such choice: a plain access that is not ordered with a conflicting one is a race and ends the run;
// others read what they must.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "random.h"

namespace pycoll::sim {

struct Thread;

using VectorClock = std::vector<uint32_t>;
void join(VectorClock& into, const VectorClock& from);

// What one thread knows.
struct View {
  int index = 0;  // its own place in vector clocks
  VectorClock seen;

  uint32_t now() const { return seen[static_cast<size_t>(index)]; }
  void tick() { ++seen[static_cast<size_t>(index)]; }
  bool knows(int other, uint32_t time) const {
    return static_cast<size_t>(other) < seen.size() && seen[static_cast<size_t>(other)] >= time;
  }
  void start(int index, const VectorClock& known);
};

enum class Order { kRelaxed, kAcquire, kRelease };

// Which values ordered loads may give. Memory itself always holds the newest.
class WeakMemory {
 public:
  static constexpr size_t kCellBytes = 4;

  // The cells at `addresses` were written together, or are read at one moment: `words` has one for each.
  void store(View& view, const uintptr_t* addresses, const uint32_t* words, size_t num_cells,
             Order order);
  void load(View& view, const uintptr_t* addresses, uint32_t* words, size_t num_cells, Order order,
            bool newest, Random& random);
  // Replaces the newest value by it plus `addend`, and returns the old one. Relaxed.
  uint32_t fetch_add(View& view, uintptr_t address, uint32_t addend);
  static void synchronise(const std::vector<Thread*>& threads);
  // Between runs the host may write.
  void forget_history() { cells_.clear(); }

 private:
  struct Message {
    uint32_t word;
    int writer;
    uint32_t writer_time;
    uint64_t stamp;
    std::shared_ptr<const VectorClock> handed_on;  // to those who acquire it
  };
  struct Cell {
    std::deque<Message> messages;  // oldest first
    std::vector<std::pair<int, uint64_t>>
        last_seen;  // stamp of the newest message that a thread has read or written
  };

  Cell& cell(uintptr_t address);
  static uint64_t& last_seen(Cell& cell, int thread);
  static size_t oldest_allowed(Cell& cell, const View& view);
  static void observe(Cell& cell, size_t message, View& view, bool acquires);

  std::unordered_map<uintptr_t, Cell> cells_;
  uint64_t next_stamp_ = 1;
};

// Finds accesses to the same byte, at least one of them a write and one of them plain, that no order keeps apart.
class RaceDetector {
 public:
  enum class Access { kPlainLoad, kPlainStore, kOrderedLoad, kOrderedStore };

  // The other thread's place in vector clocks, if there is a race.
  std::optional<int> check(const View& view, uintptr_t address, size_t nbytes, Access access);
  void forget_history() { bytes_.clear(); }

 private:
  struct Event {
    int thread = -1;
    uint32_t time = 0;
  };
  struct Byte {
    Event plain_store, ordered_store;
    std::vector<Event> plain_loads;  // since the last store that came after them
  };
  static constexpr size_t kPageBytes = 64;

  static std::optional<int> check(const View& view, Byte& byte, Access access);
  static bool is_apart(const View& view, const Event& event);

  std::unordered_map<uintptr_t, std::array<Byte, kPageBytes>> bytes_;
};

}  // namespace pycoll::sim
