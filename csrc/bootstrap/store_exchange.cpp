#include <algorithm>
#include <thread>

#include "base/error.h"
#include "bootstrap/exchange.h"

namespace pycoll {
namespace {

// Between two looks at the store; grows while nothing comes. A store's own blocking wait cannot be interrupted.
constexpr std::chrono::microseconds kShortestPause{200};
constexpr std::chrono::microseconds kLongestPause{20'000};

}  // namespace

std::string StoreExchange::key(int turn, int rank) const {
  return concat(prefix_, "/", generation_, "/", turn, "/", rank);
}

void StoreExchange::begin() {
  if (generation_ == 0) generation_ = store_->count(concat(prefix_, "/generation/", rank_));
}

std::vector<Blob> StoreExchange::all_gather(const Blob& mine, Deadline deadline,
                                            const InterruptCheck& interrupt) {
  begin();
  const int turn = turn_++;
  store_->set(key(turn, rank_), mine);
  std::vector<Blob> blobs(static_cast<size_t>(world_size_));
  std::vector<int> missing;
  std::chrono::microseconds pause = kShortestPause;
  for (int peer = 0; peer < world_size_; ++peer) {
    while (!store_->try_get(key(turn, peer), &blobs[static_cast<size_t>(peer)])) {
      if (interrupt) interrupt();
      if (deadline.passed()) {
        missing.push_back(peer);
        break;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  }
  if (!missing.empty()) {
    fail(ErrorKind::kTimeout, "rank ", rank_, " timed out making a group of ", world_size_,
         ": Timed out waiting for ", list_ranks(missing),
         "; check that they run and make the same groups in the same order, or raise the timeout");
  }
  // Whoever has read turn t + 1 of all ranks knows that all of them have read turn t.
  if (turn > 0) store_->remove(key(turn - 1, rank_));
  return blobs;
}

}  // namespace pycoll
