// Who runs next. One scheduler belongs to one OS thread; its simulated threads are fibers.
//
// A thread is *ready*, or *spins* (its polls found nothing new: it runs again when one of the polled places is written), or *waits*
// in a rendezvous (rendezvous.h), or is *done*. A step picks a ready thread at random. Now and then one thread, block or rank is
// held back for a while, so that others come far ahead of it.
//
// When nobody is ready, all spinning threads poll once more and see the newest values. If nothing comes of it, time passes, so that
// deadlines expire; and if nothing comes of that either, nobody will ever go on: a deadlock.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <source_location>
#include <string>
#include <tuple>
#include <vector>

#include "buffers.h"
#include "fiber.h"
#include "random.h"
#include "rendezvous.h"
#include "simulation.h"
#include "weak_memory.h"

namespace pycoll::sim {

using Where = std::source_location;

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

// An access to memory that others may see, for reports.
struct Access {
  const char* name = nullptr;  // of the function
  const void* address = nullptr;
  size_t nbytes = 0;
  Where where;
};

struct Block;

struct Thread {
  enum class State { kReady, kSpins, kWaits, kDone };

  std::unique_ptr<Fiber> fiber;
  Block* block = nullptr;
  Index3 thread_index, block_index, block_dim{1, 1, 1}, grid_dim{1, 1, 1};
  int lane = 0, warp = 0;

  State state = State::kReady;
  size_t ready_position = 0;  // in the scheduler's list, while ready
  Access last_access;
  bool reads_newest = false;
  const char* waits_for = "";  // while it waits

  // Places polled last before a spin, and how often each had been written when it was polled.
  static constexpr int kMaxPolls = 8;
  struct Poll {
    uint32_t place;
    uint32_t version;
  };
  std::array<Poll, kMaxPolls> polls;
  int num_polls = 0;
  uint32_t spin_ticket = 0;  // tells the spin that a place's waiter belongs to

  Exchange exchange;  // with the other threads of a rendezvous
  View view;          // what weak memory lets it see
};

struct Block {
  int rank = 0;
  int index = 0;
  const Launch* launch = nullptr;
  std::vector<Thread*> threads;
  int num_alive = 0;
  std::map<RendezvousKey, Rendezvous> rendezvous;
  std::map<std::string, std::unique_ptr<std::byte[]>> shared_arrays;
};

class Scheduler {
 public:
  Scheduler(std::vector<Stream>* streams, const BufferMap* buffers, const Options& options);
  ~Scheduler();

  Report run();

  // ---- for simulated threads. What writes is not inline: kernels, into which it would go, are watched by ThreadSanitizer.

  static Scheduler* current() { return current_; }
  Thread& self() { return *self_; }
  bool is_weak() const { return options_.memory == Memory::kWeak; }
  bool tears_lines() const { return options_.tear_lines; }
  // Loads of this thread give the newest value: it has waited long enough for one.
  bool must_read_newest() const { return self_->reads_newest; }
  WeakMemory& weak_memory() { return weak_memory_; }
  Random& random() { return random_; }
  bool toss_coin();

  // Before every visible access: perhaps another thread goes on first.
  void before_access(const char* name, const void* address, size_t nbytes, const Where& where);
  void preempt();
  void check_race(const void* address, size_t nbytes, RaceDetector::Access access);
  void note_poll(const void* address);
  void note_store(const void* address, size_t nbytes);
  void spin();
  uint64_t clock_ns();

  void wait(const char* what);  // until wake()
  void wake(Thread& thread);
  // Ends the run.
  [[noreturn]] void fail(Verdict verdict, const std::string& text);
  // "rank 0 block 1 thread 2"
  static std::string text_of(const Thread& thread);

 private:
  struct Place {
    uint32_t version = 0;
    std::vector<std::pair<Thread*, uint32_t>> waiters;  // and their tickets
  };
  // A rank's stream, while its launches run.
  struct Queue {
    Stream* stream = nullptr;
    size_t next_launch = 0;
    const Launch* launch = nullptr;
    int next_block = 0;
    int num_alive_blocks = 0;
    std::vector<Block*> blocks;
    VectorClock clock;  // what the finished kernels saw
    char tag = 0;       // the same, for ThreadSanitizer
  };

  static void thread_main(void* thread);
  void enter(Thread& thread);
  [[noreturn]] void fail_access();

  void start_blocks();
  bool start_next_block(int rank);
  void start_thread(Block& block, int index);
  void retire(Thread& thread);
  void end_launch(Queue& queue);
  int& resident_blocks_of(int rank);

  Thread* pick();
  bool is_held_back(const Thread& thread) const;
  void hold_somebody_back();
  void make_ready(Thread& thread);
  void remove_ready(Thread& thread);
  void wake_waiters(Place& place);
  Place& place_of(uintptr_t granule) { return places_[granule * 0x9E3779B97F4A7C15u >> 52]; }

  void idle();
  void yield_to_other_schedulers();
  std::string describe_all() const;
  std::string describe(const Thread& thread) const;

  static thread_local Scheduler* current_;

  std::vector<Stream>* const streams_;
  const BufferMap* const buffers_;
  const Options options_;
  Random random_;
  WeakMemory weak_memory_;
  RaceDetector race_detector_;
  StackPool stacks_;
  std::vector<Queue> queues_;
  std::vector<int> resident_blocks_;  // of each device
  std::deque<Thread> threads_;        // of this run, the finished ones too
  std::deque<Block> blocks_;
  std::map<std::tuple<int, int, int>, int> clock_indices_;  // of rank, block, thread
  std::vector<std::string> names_of_clocks_;

  Thread* self_ = nullptr;
  std::vector<Thread*> ready_;
  std::vector<Thread*> spinning_;  // some of them may have been woken since
  int num_alive_ = 0;
  std::array<Place, 4096> places_;

  int accesses_until_preemption_ = 1;
  uint64_t accesses_ = 0, switches_ = 0;
  uint64_t stores_ = 0;  // visible ones
  // Who is held back: all threads with this rank, and this block and thread unless they are -1.
  int held_rank_ = -1, held_block_ = -1, held_thread_ = -1;
  uint64_t held_until_ = 0;

  uint64_t stores_when_idle_ = 0;
  int idle_rounds_ = 0;
  uint64_t idle_ns_ = 0;
  int spins_in_a_row_ = 0;
  bool has_failed_ = false;
  char start_tag_ = 0;  // for ThreadSanitizer
  Report report_;
};

}  // namespace pycoll::sim
