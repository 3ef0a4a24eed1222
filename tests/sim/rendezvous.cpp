#include "rendezvous.h"

#include <bit>
#include <string>

#include "sanitizers.h"
#include "scheduler.h"

namespace pycoll::sim {

void Rendezvous::arrive(const Meeting& meeting, const Act& act) {
  Scheduler& scheduler = *Scheduler::current();
  Thread& self = scheduler.self();
  if (!arrived_.empty() && name_ != meeting.name) {
    scheduler.fail(Verdict::kMisuse, std::string("threads meet in ") + name_ + " and in " +
                                         meeting.name + " at once");
  }
  name_ = meeting.name;
  act_ = act;
  synchronises_ = meeting.synchronises;
  arrived_.push_back(&self);
  char* const tag = &tags_[generation_ % 2];
  if (meeting.synchronises) sanitizer_release(tag);
  if (static_cast<int>(arrived_.size()) >= meeting.num_expected) {
    complete();
  } else {
    scheduler.wait(meeting.name);
  }
  if (meeting.synchronises) sanitizer_acquire(tag);
}

void Rendezvous::expect(int num_expected) {
  if (!arrived_.empty() && static_cast<int>(arrived_.size()) >= num_expected) complete();
}

void Rendezvous::complete() {
  std::vector<Thread*> arrived;
  arrived.swap(arrived_);
  ++generation_;
  if (act_) act_(arrived);
  if (synchronises_) WeakMemory::synchronise(arrived);
  Scheduler& scheduler = *Scheduler::current();
  for (Thread* thread : arrived) scheduler.wake(*thread);
}

namespace meet {
namespace {

constexpr int kWarpThreads = 32;
using Kind = RendezvousKey::Kind;

// The lanes of `mask` that have not ended.
int expected_lanes(const Thread& self, uint32_t mask) {
  int expected = 0;
  for (const Thread* thread : self.block->threads) {
    const bool is_meant = thread->warp == self.warp && (mask >> thread->lane & 1u) != 0;
    expected += is_meant && thread->state != Thread::State::kDone;
  }
  return expected;
}

void meet_lanes(Kind kind, uint32_t mask, bool synchronises, const char* name,
                const Rendezvous::Act& act) {
  Scheduler& scheduler = *Scheduler::current();
  Thread& self = scheduler.self();
  if ((mask >> self.lane & 1u) == 0) {
    scheduler.fail(Verdict::kMisuse, std::string(name) + " with a mask that leaves out the lane " +
                                         std::to_string(self.lane) + " that calls it");
  }
  Rendezvous& rendezvous = self.block->rendezvous[{kind, self.warp, mask}];
  rendezvous.arrive({expected_lanes(self, mask), synchronises, name}, act);
}

Thread* lane_of(const std::vector<Thread*>& threads, int lane) {
  for (Thread* thread : threads)
    if (thread->lane == lane) return thread;
  return nullptr;
}

}  // namespace

void block_barrier(const char* name) {
  const Unwatched unwatched;
  Thread& self = Scheduler::current()->self();
  self.block->rendezvous[{Kind::kBlockBarrier}].arrive({self.block->num_alive, true, name}, {});
}

bool block_all(bool condition) {
  const Unwatched unwatched;
  Thread& self = Scheduler::current()->self();
  self.exchange.given[0] = condition;
  self.block->rendezvous[{Kind::kBlockBarrier}].arrive(
      {self.block->num_alive, true, "__syncthreads_and"}, [](std::vector<Thread*>& threads) {
        bool all = true;
        for (const Thread* thread : threads) all &= thread->exchange.given[0] != 0;
        for (Thread* thread : threads) thread->exchange.taken[0] = all;
      });
  return self.exchange.taken[0] != 0;
}

void warp_barrier(uint32_t mask) {
  const Unwatched unwatched;
  meet_lanes(Kind::kWarpBarrier, mask, true, "__syncwarp", {});
}

uint32_t ballot(uint32_t mask, bool condition) {
  const Unwatched unwatched;
  Thread& self = Scheduler::current()->self();
  self.exchange.given[0] = condition;
  meet_lanes(Kind::kVote, mask, false, "a vote", [](std::vector<Thread*>& threads) {
    uint64_t votes = 0;
    for (const Thread* thread : threads) votes |= thread->exchange.given[0] << thread->lane;
    for (Thread* thread : threads) thread->exchange.taken[0] = votes;
  });
  return static_cast<uint32_t>(self.exchange.taken[0]);
}

uint64_t shuffle(uint32_t mask, uint64_t value, int source_lane) {
  const Unwatched unwatched;
  Thread& self = Scheduler::current()->self();
  self.exchange.given[0] = value;
  self.exchange.source_lane = source_lane;
  meet_lanes(Kind::kShuffle, mask, false, "a shuffle", [](std::vector<Thread*>& threads) {
    for (Thread* thread : threads) {
      const Thread* source = lane_of(threads, thread->exchange.source_lane);
      if (source == nullptr) {
        Scheduler::current()->fail(Verdict::kMisuse,
                                   "a shuffle from lane " +
                                       std::to_string(thread->exchange.source_lane) +
                                       ", which takes no part");
      }
      thread->exchange.taken[0] = source->exchange.given[0];
    }
  });
  return self.exchange.taken[0];
}

void* shared_array(const char* key, size_t nbytes) {
  const Unwatched unwatched;
  auto& array = Scheduler::current()->self().block->shared_arrays[key];
  if (!array) array = std::make_unique<std::byte[]>(nbytes);
  return array.get();
}

void line(void* address, uint64_t (&parts)[2], const Rendezvous::Act& act) {
  constexpr int kLanes = 8;
  Thread& self = Scheduler::current()->self();
  self.exchange.address = address;
  for (int i = 0; i < 2; ++i) self.exchange.given[i] = parts[i];
  const uint32_t mask = 0xffu << (self.lane / kLanes * kLanes);
  meet_lanes(Kind::kLine, mask, false, "a line of 128 bytes", [&](std::vector<Thread*>& threads) {
    std::vector<Thread*> lanes(threads.size());
    for (Thread* thread : threads) lanes[static_cast<size_t>(thread->lane % kLanes)] = thread;
    const auto first = reinterpret_cast<uintptr_t>(lanes.front()->exchange.address);
    bool is_line = lanes.size() == kLanes && first % (kLanes * 16) == 0;
    for (size_t i = 0; i < lanes.size(); ++i)
      is_line &= reinterpret_cast<uintptr_t>(lanes[i]->exchange.address) == first + 16 * i;
    if (!is_line) Scheduler::current()->fail(Verdict::kMisuse, "lanes that name no aligned line");
    act(lanes);
  });
  for (int i = 0; i < 2; ++i) parts[i] = self.exchange.taken[i];
}

}  // namespace meet
}  // namespace pycoll::sim
