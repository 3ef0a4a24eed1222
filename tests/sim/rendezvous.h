// Where threads of a block meet: __syncthreads, named barriers, warp functions, the lanes of a line. The last to arrive does what is
// to be done for all of them; then all go on.
#pragma once

#include <compare>
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
  enum class Kind { kBlockBarrier, kNamedBarrier, kWarpBarrier, kShuffle, kVote, kLine };

  Kind kind = Kind::kBlockBarrier;
  int number = 0;     // of the barrier or the warp
  uint32_t mask = 0;  // lanes
  auto operator<=>(const RendezvousKey&) const = default;
};

class Rendezvous {
 public:
  struct Meeting {
    int num_expected;
    bool synchronises;  // what the threads wrote before is seen by all of them afterwards
    const char* name;   // for reports
    std::string where;
  };

  // The calling thread arrives and returns when all have. `act` is called once, with all of them, before any goes on.
  void arrive(const Meeting& meeting, const std::function<void(std::vector<Thread*>&)>& act);
  // A thread that was expected has ended.
  void expect(int num_expected);

 private:
  void complete();

  std::vector<Thread*> arrived_;
  std::function<void(std::vector<Thread*>&)> act_;
  bool synchronises_ = false;
  uint64_t generation_ = 0;
  char tags_[2] = {};  // for ThreadSanitizer, used in turn
};

}  // namespace pycoll::sim
