// What comes from peers or the store is not believed: damaged blobs and greetings end in an error or in a working group, never in
// an access to memory that is not there (the sanitizers watch), nor in a wait beyond the deadline.
#include <signal.h>
#include <sys/socket.h>

#include <random>

#include "bootstrap/blob.h"
#include "processes.h"
#include "ranks.h"

using namespace pycoll;
using namespace pycoll::test;

namespace {

using Random = std::mt19937;
constexpr std::chrono::milliseconds kTimeout{60};

size_t below(Random& random, size_t n) {
  return n == 0 ? 0 : std::uniform_int_distribution<size_t>(0, n - 1)(random);
}

// Flips bytes, cuts, appends, or puts other numbers into whole words.
Blob damaged(Blob blob, Random& random) {
  switch (below(random, 5)) {
    case 0:
      for (size_t i = 0; i <= below(random, 4) && !blob.empty(); ++i)
        blob[below(random, blob.size())] ^= static_cast<uint8_t>(1u << below(random, 8));
      break;
    case 1:
      blob.resize(below(random, blob.size() + 1));
      break;
    case 2:
      for (size_t i = below(random, 40); i > 0; --i)
        blob.push_back(static_cast<uint8_t>(below(random, 256)));
      break;
    case 3: {
      const uint64_t words[] = {0, 1, 64, UINT64_MAX, uint64_t{1} << 63, uint64_t{1} << 40, 4096};
      if (blob.size() < 8) break;
      const uint64_t word = words[below(random, std::size(words))];
      std::memcpy(blob.data() + below(random, blob.size() - 7), &word, sizeof(word));
      break;
    }
    default:
      for (uint8_t& byte : blob) byte = static_cast<uint8_t>(below(random, 256));
  }
  return blob;
}

// Shows what rank 1 gives in the `target`-th turn to the others in a damaged form.
class DamagingExchange final : public Exchange {
 public:
  DamagingExchange(Exchange* exchange, int target, uint32_t seed)
      : exchange_(exchange), target_(target), random_(seed) {}
  int rank() const override { return exchange_->rank(); }
  int world_size() const override { return exchange_->world_size(); }
  std::vector<Blob> all_gather(const Blob& mine, Deadline deadline,
                               const InterruptCheck& interrupt) override {
    std::vector<Blob> blobs = exchange_->all_gather(mine, deadline, interrupt);
    if (turn_++ == target_ && rank() == 0) blobs[1] = damaged(std::move(blobs[1]), random_);
    return blobs;
  }
  bool peek(int rank, Blob* blob) override { return exchange_->peek(rank, blob); }

 private:
  Exchange* const exchange_;
  const int target_;
  Random random_;
  int turn_ = 0;
};

// Whether a group came to be. If so, nothing of it is used: the other rank may have another idea of it.
bool try_to_make(Exchange* exchange, const std::shared_ptr<Runtime>& runtime) {
  CommunicatorOptions options;
  options.timeout = kTimeout;
  try {
    Communicator::create(exchange, [&](const Env&) { return runtime; }, options);
    return true;
  } catch (const Error& error) {
    CHECK(std::string(error.what()).size() > 20, "%s", error.what());
    return false;
  }
}

std::shared_ptr<Runtime> small_runtime() {
  Env env = Env::read();
  env.segment_bytes = size_t{16} << 20;
  return Runtime::create(env);
}

}  // namespace

TEST(damaged_blobs_between_threads) {
  constexpr int kTrials = 60;
  std::atomic<int> made{0};
  for (int trial = 0; trial < kTrials; ++trial) {
    auto place = std::make_shared<ThreadRendezvous>(2);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        ThreadExchange exchange(place, rank);
        DamagingExchange damaging(&exchange, trial % 2, static_cast<uint32_t>(trial));
        if (try_to_make(&damaging, small_runtime())) made.fetch_add(1);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  // Appended bytes are ignored, and one rank may not notice: the damage is neither always nor never fatal.
  CHECK(made > kTrials / 20 && made < 2 * kTrials * 19 / 20, "%d made", made.load());
}

TEST(damaged_blobs_between_processes) {
  for (int trial = 0; trial < 10; ++trial) {
    run_two_processes([trial](Exchange& exchange) {
      DamagingExchange damaging(&exchange, trial % 2, 1000 + static_cast<uint32_t>(trial));
      try_to_make(&damaging, small_runtime());
    });
  }
}

TEST(strangers_who_say_anything) {
  const auto endpoint = Endpoint::create(size_t{16} << 20);
  std::string name = "pycoll-";
  for (const uint8_t byte : endpoint->id()) {
    char hex[3];
    std::snprintf(hex, sizeof(hex), "%02x", byte);
    name += hex;
  }
  Random random(7);
  std::atomic<int> calls{0};
  std::thread stranger([&] {
    for (int call = 0; call < 60; ++call) {  // fewer than may queue, so that none blocks
      const UniqueFd socket = connect_abstract(name);
      if (!socket) continue;
      std::vector<uint8_t> words(below(random, 300));
      for (uint8_t& byte : words) byte = static_cast<uint8_t>(below(random, 256));
      try {
        if (below(random, 2) == 0) {
          send_with_fd(socket, words.data(), words.size(), 0);
        } else if (!words.empty()) {
          CHECK(send(socket.get(), words.data(), words.size(), MSG_NOSIGNAL) != 0);
        }
      } catch (const Error&) {
        // It has hung up already.
      }
      calls.fetch_add(1);
    }
  });
  // A rank that waits for one that never calls, with all these calling in its place.
  BlobWriter mine, other;
  endpoint->write_greeting(&mine);
  const auto another = Endpoint::create(size_t{16} << 20);
  another->write_greeting(&other);
  Blob from_elsewhere = other.take();
  from_elsewhere[sizeof(Token)] ^= 1;  // another address space
  const Blob own = mine.take();
  std::vector<BlobReader> readers = {{own, 0}, {from_elsewhere, 1}};
  ErrorKind kind = ErrorKind::kMismatch;
  try {
    endpoint->connect(&readers, 0, random_token(), Deadline::after(std::chrono::milliseconds(500)),
                      nullptr);
  } catch (const Error& error) {
    kind = error.kind();
  }
  stranger.join();
  CHECK(kind == ErrorKind::kTimeout, "kind %d", static_cast<int>(kind));
  CHECK(endpoint->num_peers() == 0);
  CHECK(calls.load() > 20, "%d calls", calls.load());
}

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);  // the other process may have given up
  return run_tests(argc, argv);
}
