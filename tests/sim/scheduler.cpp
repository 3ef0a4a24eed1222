#include "scheduler.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "sanitizers.h"

namespace pycoll::sim {

thread_local Scheduler* Scheduler::current_ = nullptr;

namespace {
constexpr int kWarpThreads = 32;
// Rounds in which all spinning threads polled in vain until time is made to pass, and until a deadlock is declared.
constexpr int kRoundsUntilTimePasses = 4;
constexpr int kMaxIdleRounds = 2000;
constexpr uint64_t kIdleStepNs = 50'000'000;
constexpr int kMaxThreadsInReport = 24;
}  // namespace

Scheduler::Scheduler(std::vector<Stream>* streams, const BufferMap* buffers, const Options& options)
    : streams_(streams),
      buffers_(buffers),
      options_(options),
      random_(options.seed),
      queues_(streams->size()),
      resident_blocks_(options.one_device ? 1 : streams->size()) {
  for (size_t i = 0; i < queues_.size(); ++i) queues_[i].stream = &(*streams_)[i];
}

Scheduler::~Scheduler() = default;

// ---- the run

Report Scheduler::run() {
  const Unwatched unwatched;
  if (has_failed_) return report_;
  current_ = this;
  weak_memory_.forget_history();
  race_detector_.forget_history();
  VectorClock known;
  for (const Queue& queue : queues_) join(known, queue.clock);
  for (Queue& queue : queues_) queue.clock = known;
  sanitizer_release(&start_tag_);
  start_blocks();
  while (num_alive_ > 0 && !has_failed_) {
    if (Thread* const thread = pick()) {
      enter(*thread);
    } else {
      idle();
    }
    if (accesses_ + switches_ > options_.max_steps && !has_failed_) {
      has_failed_ = true;
      report_.verdict = Verdict::kStepLimit;
      report_.text = describe_all();
    }
  }
  // Threads that a failure has left where they were.
  for (Thread& thread : threads_) {
    if (thread.state != Thread::State::kDone) thread.fiber->release(&start_tag_);
  }
  sanitizer_acquire(&start_tag_);
  for (Queue& queue : queues_) sanitizer_acquire(&queue.tag);
  report_.accesses = accesses_;
  report_.switches = switches_;
  if (!has_failed_) {
    for (Queue& queue : queues_) {
      queue.stream->launches_.clear();
      queue.next_launch = 0;
    }
    threads_.clear();
    blocks_.clear();
  }
  current_ = nullptr;
  return report_;
}

void Scheduler::enter(Thread& thread) {
  self_ = &thread;
  ++switches_;
  thread.fiber->enter();
  self_ = nullptr;
  if (thread.state == Thread::State::kDone) retire(thread);
}

void Scheduler::thread_main(void* argument) {
  Thread& thread = *static_cast<Thread*>(argument);
  Scheduler& scheduler = *current();
  Queue& queue = scheduler.queues_[static_cast<size_t>(thread.block->rank)];
  sanitizer_acquire(&scheduler.start_tag_);
  sanitizer_acquire(&queue.tag);
  thread.block->launch->body();
  sanitizer_release(&queue.tag);
  thread.state = Thread::State::kDone;
  thread.fiber->leave_for_good();
}

// ---- launches

int& Scheduler::resident_blocks_of(int rank) {
  return resident_blocks_[options_.one_device ? 0 : static_cast<size_t>(rank)];
}

// Blocks start while there is room; which rank's go first is chance.
void Scheduler::start_blocks() {
  const auto num_ranks = static_cast<int>(queues_.size());
  for (bool has_started = true; has_started;) {
    has_started = false;
    const auto first = static_cast<int>(random_.below(static_cast<uint64_t>(num_ranks)));
    for (int i = 0; i < num_ranks; ++i) has_started |= start_next_block((first + i) % num_ranks);
  }
}

bool Scheduler::start_next_block(int rank) {
  Queue& queue = queues_[static_cast<size_t>(rank)];
  if (queue.launch == nullptr) {
    if (queue.next_launch == queue.stream->launches_.size()) return false;
    queue.launch = &queue.stream->launches_[queue.next_launch++];
    queue.next_block = 0;
    queue.num_alive_blocks = queue.launch->num_blocks;
    queue.blocks.clear();
  }
  if (queue.next_block == queue.launch->num_blocks) return false;
  int& resident = resident_blocks_of(rank);
  if (options_.resident_blocks > 0 && resident >= options_.resident_blocks) return false;
  ++resident;
  Block& block = blocks_.emplace_back();
  block.rank = rank;
  block.index = queue.next_block++;
  block.launch = queue.launch;
  block.num_alive = queue.launch->threads_per_block;
  for (int i = 0; i < block.num_alive; ++i) start_thread(block, i);
  return true;
}

void Scheduler::start_thread(Block& block, int index) {
  Thread& thread = threads_.emplace_back();
  thread.block = &block;
  thread.thread_index = {static_cast<unsigned>(index), 0, 0};
  thread.block_index = {static_cast<unsigned>(block.index), 0, 0};
  thread.block_dim = {static_cast<unsigned>(block.launch->threads_per_block), 1, 1};
  thread.grid_dim = {static_cast<unsigned>(block.launch->num_blocks), 1, 1};
  thread.lane = index % kWarpThreads;
  thread.warp = index / kWarpThreads;
  const auto next_clock = static_cast<int>(clock_indices_.size());
  const auto [clock, is_new] =
      clock_indices_.try_emplace({block.rank, block.index, index}, next_clock);
  if (is_new) names_of_clocks_.push_back(text_of(thread));
  if (is_weak()) thread.view.start(clock->second, queues_[static_cast<size_t>(block.rank)].clock);
  thread.fiber = std::make_unique<Fiber>(stacks_.take(), thread_main, &thread);
  block.threads.push_back(&thread);
  ++num_alive_;
  thread.state = Thread::State::kWaits;
  make_ready(thread);
}

void Scheduler::retire(Thread& thread) {
  remove_ready(thread);
  stacks_.give_back(thread.fiber->release_stack());
  thread.fiber.reset();
  --num_alive_;
  Block& block = *thread.block;
  Queue& queue = queues_[static_cast<size_t>(block.rank)];
  if (is_weak()) join(queue.clock, thread.view.seen);
  --block.num_alive;
  // A thread that has ended is no longer waited for at the block's barrier.
  for (auto& [key, rendezvous] : block.rendezvous)
    if (key.kind == RendezvousKey::Kind::kBlockBarrier) rendezvous.expect(block.num_alive);
  if (block.num_alive > 0) return;
  --resident_blocks_of(block.rank);
  if (--queue.num_alive_blocks == 0) queue.launch = nullptr;
  start_blocks();
}

// ---- who goes on

Thread* Scheduler::pick() {
  if (ready_.empty()) return nullptr;
  if (switches_ >= held_until_) hold_somebody_back();
  constexpr int kDraws = 4;
  Thread* thread = nullptr;
  for (int i = 0; i < kDraws; ++i) {
    thread = ready_[random_.below(ready_.size())];
    if (!is_held_back(*thread)) break;
  }
  return thread;
}

bool Scheduler::is_held_back(const Thread& thread) const {
  return thread.block->rank == held_rank_ &&
         (held_block_ < 0 || thread.block->index == held_block_) &&
         (held_thread_ < 0 || static_cast<int>(thread.thread_index.x) == held_thread_);
}

void Scheduler::hold_somebody_back() {
  const Thread& victim = *ready_[random_.below(ready_.size())];
  held_rank_ = victim.block->rank;
  held_block_ = random_.chance(60) ? victim.block->index : -1;
  held_thread_ =
      held_block_ >= 0 && random_.chance(60) ? static_cast<int>(victim.thread_index.x) : -1;
  held_until_ = switches_ + 20 + random_.below(2000);
}

void Scheduler::make_ready(Thread& thread) {
  thread.state = Thread::State::kReady;
  thread.ready_position = ready_.size();
  ready_.push_back(&thread);
}

void Scheduler::remove_ready(Thread& thread) {
  if (thread.ready_position >= ready_.size() || ready_[thread.ready_position] != &thread) return;
  ready_[thread.ready_position] = ready_.back();
  ready_[thread.ready_position]->ready_position = thread.ready_position;
  ready_.pop_back();
}

bool Scheduler::toss_coin() { return random_.chance(50); }

void Scheduler::before_access(const char* name, const void* address, size_t nbytes,
                              const Where& where) {
  self_->last_access = {name, address, nbytes, where};
  ++accesses_;
  if (!buffers_->allows(address, nbytes)) fail_access();
  if (--accesses_until_preemption_ <= 0) preempt();
}

void Scheduler::preempt() {
  const Unwatched unwatched;
  const int percent = options_.preempt_percent;
  accesses_until_preemption_ =
      percent <= 0 ? 1'000'000
                   : 1 + static_cast<int>(random_.below(static_cast<uint64_t>(200 / percent)));
  self_->reads_newest = false;
  self_->fiber->leave();
}

void Scheduler::wait(const char* what) {
  Thread& thread = *self_;
  thread.waits_for = what;
  thread.state = Thread::State::kWaits;
  remove_ready(thread);
  thread.fiber->leave();
}

void Scheduler::wake(Thread& thread) {
  if (thread.state == Thread::State::kWaits) make_ready(thread);
}

// ---- polls

void Scheduler::note_poll(const void* address) {
  Thread& thread = *self_;
  const auto granule = reinterpret_cast<uintptr_t>(address) / 16;
  const auto place = static_cast<uint32_t>(&place_of(granule) - places_.data());
  thread.polls[static_cast<size_t>(thread.num_polls++ % Thread::kMaxPolls)] = {
      place, places_[place].version};
}

void Scheduler::note_store(const void* address, size_t nbytes) {
  ++stores_;
  const auto begin = reinterpret_cast<uintptr_t>(address);
  for (uintptr_t granule = begin / 16; granule * 16 < begin + nbytes; ++granule) {
    Place& place = place_of(granule);
    ++place.version;
    if (!place.waiters.empty()) wake_waiters(place);
  }
}

void Scheduler::wake_waiters(Place& place) {
  for (const auto& [thread, ticket] : place.waiters)
    if (thread->state == Thread::State::kSpins && thread->spin_ticket == ticket)
      make_ready(*thread);
  place.waiters.clear();
}

void Scheduler::spin() {
  const Unwatched unwatched;
  Thread& thread = *self_;
  const int num_polls = std::min(thread.num_polls, Thread::kMaxPolls);
  thread.num_polls = 0;
  bool has_news = num_polls == 0 || !options_.alone;
  for (int i = 0; !has_news && i < num_polls; ++i) {
    const Thread::Poll& poll = thread.polls[static_cast<size_t>(i)];
    has_news = places_[poll.place].version != poll.version;
  }
  if (!options_.alone) yield_to_other_schedulers();
  if (!has_news) {
    ++thread.spin_ticket;
    thread.state = Thread::State::kSpins;
    remove_ready(thread);
    for (int i = 0; i < num_polls; ++i)
      places_[thread.polls[static_cast<size_t>(i)].place].waiters.emplace_back(&thread,
                                                                               thread.spin_ticket);
    spinning_.push_back(&thread);
  }
  thread.reads_newest = false;
  thread.fiber->leave();
}

void Scheduler::yield_to_other_schedulers() {
  if (++spins_in_a_row_ % 64 == 0) sched_yield();
}

uint64_t Scheduler::clock_ns() {
  if (!options_.alone) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
  }
  return accesses_ + switches_ + idle_ns_;
}

void Scheduler::idle() {
  idle_rounds_ = stores_ == stores_when_idle_ ? idle_rounds_ + 1 : 0;
  stores_when_idle_ = stores_;
  if (idle_rounds_ > kRoundsUntilTimePasses) idle_ns_ += kIdleStepNs;
  std::erase_if(spinning_, [](const Thread* t) { return t->state != Thread::State::kSpins; });
  if (spinning_.empty() || idle_rounds_ > kMaxIdleRounds) {
    has_failed_ = true;
    report_.verdict = Verdict::kDeadlock;
    report_.text = describe_all();
    return;
  }
  for (Thread* thread : spinning_) {
    if (thread->state != Thread::State::kSpins) continue;  // it is twice in the list
    thread->reads_newest = true;
    make_ready(*thread);
  }
  spinning_.clear();
}

// ---- reports

void Scheduler::fail(Verdict verdict, const std::string& text) {
  report_.verdict = verdict;
  report_.text = std::string(name(verdict)) + ": " + (self_ ? describe(*self_) + ": " : "") + text;
  has_failed_ = true;
  if (self_ == nullptr) std::abort();
  self_->state = Thread::State::kWaits;
  for (;;) self_->fiber->leave();
}

void Scheduler::fail_access() { fail(Verdict::kBadAccess, "no buffer has these bytes"); }

void Scheduler::check_race(const void* address, size_t nbytes, RaceDetector::Access access) {
  if (!options_.check_races) return;
  const auto other =
      race_detector_.check(self_->view, reinterpret_cast<uintptr_t>(address), nbytes, access);
  if (other)
    fail(Verdict::kRace, "not ordered with " + names_of_clocks_[static_cast<size_t>(*other)]);
}

std::string Scheduler::text_of(const Thread& thread) {
  return "rank " + std::to_string(thread.block->rank) + " block " +
         std::to_string(thread.block_index.x) + " thread " + std::to_string(thread.thread_index.x);
}

std::string Scheduler::describe(const Thread& thread) const {
  std::string text = text_of(thread) + " in " + thread.block->launch->name;
  if (thread.state == Thread::State::kWaits) return text + ": waits in " + thread.waits_for;
  if (thread.last_access.name == nullptr) return text;
  const Access& access = thread.last_access;
  char where[256];
  std::snprintf(where, sizeof(where), ": %s of %zu bytes at %p, %s:%u", access.name, access.nbytes,
                access.address, access.where.file_name(),
                static_cast<unsigned>(access.where.line()));
  return text + (thread.state == Thread::State::kSpins ? ": spins" : "") + where;
}

std::string Scheduler::describe_all() const {
  std::string text = std::string(name(report_.verdict)) + ": " + std::to_string(num_alive_) +
                     " threads have not ended";
  int num_described = 0;
  for (const Thread& thread : threads_) {
    if (thread.state == Thread::State::kDone) continue;
    if (++num_described > kMaxThreadsInReport) return text + "\n  ...";
    text += "\n  " + describe(thread);
  }
  return text;
}

}  // namespace pycoll::sim
