// Where threads of a block meet: __syncthreads, warp functions, the lanes of a line. The last to arrive does what
// is to be done for all of them; then all go on.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace pycoll::sim {

struct Thread;

// What a thread brings to a rendezvous, and what it takes away.
struct Exchange {
  uint64_t given[2] = {};
  void* address = nullptr;
  int source_lane = 0;
  uint64_t taken[2] = {};
};

struct RendezvousKey {
  enum class Kind { kBlockBarrier, kWarpBarrier, kShuffle, kVote, kLine };

  Kind kind = Kind::kBlockBarrier;
  int number = 0;     // of the warp
  uint32_t mask = 0;  // lanes
  auto operator<=>(const RendezvousKey&) const = default;
};

class Rendezvous {
 public:
  using Act = std::function<void(std::vector<Thread*>&)>;
  struct Meeting {
    int num_expected;
    bool synchronises;  // what the threads wrote before is seen by all of them afterwards
    const char* name;   // for reports
  };

  // The calling thread arrives and returns when all have. `act` is called once, with all of them, before any goes on.
  void arrive(const Meeting& meeting, const Act& act);
  // A thread that was expected has ended.
  void expect(int num_expected);
  bool is_empty() const { return arrived_.empty(); }

 private:
  void complete();

  std::vector<Thread*> arrived_;
  Act act_;
  const char* name_ = nullptr;
  bool synchronises_ = false;
  uint64_t generation_ = 0;
  char tags_[2] = {};  // for ThreadSanitizer, used in turn
};

// What kernels call, for the running thread.
namespace meet {
void block_barrier(const char* name);
// True if the condition holds for every thread of the block that has not ended.
bool block_all(bool condition);
void warp_barrier(uint32_t mask);
uint32_t ballot(uint32_t mask, bool condition);
uint64_t shuffle(uint32_t mask, uint64_t value, int source_lane);
// Memory that the threads of the block share; `key` names it within the kernel.
void* shared_array(const char* key, size_t nbytes);
// Eight lanes arrive; `act` moves their line.
void line(void* address, uint64_t (&parts)[2], const Rendezvous::Act& act);
}  // namespace meet

}  // namespace pycoll::sim
