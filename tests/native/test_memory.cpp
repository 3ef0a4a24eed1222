// Arena, segment and endpoint.
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <map>
#include <random>
#include <thread>

#include "check.h"
#include "memory/endpoint.h"
#include "processes.h"

using namespace pycoll;
using namespace pycoll::test;

namespace {

constexpr size_t kGrain = Arena::kGrain;
constexpr size_t kMiB = size_t{1} << 20;

template <class Fn>
std::string text_of_error(ErrorKind kind, const Fn& fn) {
  try {
    fn();
  } catch (const Error& error) {
    CHECK(error.kind() == kind, "%s", error.what());
    return error.what();
  }
  CHECK(false, "nothing was raised");
  return "";
}

Deadline soon(int ms = 10000) { return Deadline::after(std::chrono::milliseconds(ms)); }

}  // namespace

// ---- arena

TEST(arena_takes_the_first_piece_that_fits) {
  Arena arena(Segment::create(16 * kMiB));
  const Region a = arena.allocate(3 * kGrain), b = arena.allocate(1),
               c = arena.allocate(2 * kGrain), d = arena.allocate(1);
  CHECK(a.offset == 0 && b.offset == 3 * kGrain && c.offset == 4 * kGrain &&
        d.offset == 6 * kGrain);
  CHECK(b.nbytes == kGrain, "sizes are rounded up to the grain");
  arena.release(a);
  arena.release(c);
  CHECK(arena.allocate(2 * kGrain).offset == a.offset);
  CHECK(arena.allocate(2 * kGrain).offset == c.offset);
  CHECK(arena.allocate(kGrain).offset == 2 * kGrain, "what was left of the first piece");
  CHECK(arena.bytes_in_use() == 7 * kGrain);
}

TEST(arena_merges_neighbours_in_whatever_order_they_come_back) {
  std::vector<size_t> order = {0, 1, 2, 3};
  do {
    const auto segment = Segment::create(16 * kMiB);
    Arena arena(segment);
    std::vector<Region> regions;
    for (int i = 0; i < 4; ++i)
      regions.push_back(arena.allocate(kGrain * (1 + static_cast<size_t>(i))));
    const size_t committed = segment->committed();
    for (const size_t i : order) arena.release(regions[i]);
    CHECK(arena.bytes_in_use() == 0);
    CHECK(arena.allocate(10 * kGrain).offset == 0 && segment->committed() == committed);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(arena_extends_the_last_free_piece) {
  const auto segment = Segment::create(16 * kMiB);
  Arena arena(segment);
  const Region a = arena.allocate(kGrain), b = arena.allocate(2 * kGrain);
  arena.release(b);
  const Region c = arena.allocate(5 * kGrain);
  CHECK(c.offset == a.nbytes && segment->committed() == 6 * kGrain);
  const std::byte* bytes = arena.address(c);
  for (size_t i = 2 * kGrain; i < c.nbytes; ++i)
    CHECK(bytes[i] == std::byte{0}, "new memory is zero");
}

TEST(arena_gives_back_when_nobody_uses_it_any_more) {
  const auto segment = Segment::create(16 * kMiB);
  Arena arena(segment);
  bool unused = false;
  int looked = 0;
  const Region a = arena.allocate(4 * kGrain);
  arena.release_when(a, [&] { return ++looked, unused; });
  CHECK(looked == 0 && arena.bytes_in_use() == 4 * kGrain);
  const Region b = arena.allocate(kGrain);
  CHECK(looked == 1 && b.offset == 4 * kGrain, "still in use, so the segment has grown");
  unused = true;
  CHECK(arena.allocate(2 * kGrain).offset == 0 && looked == 2);
  arena.release(b);
  CHECK(arena.allocate(2 * kGrain).offset == 2 * kGrain && looked == 2,
        "there was room, so nobody looked");
  arena.release_when(Region{}, [&] { return ++looked, true; });
  arena.release(Region{});
  arena.allocate(64 * kGrain);
  CHECK(looked == 2, "an empty region is nothing to give back");
}

TEST(arena_says_what_it_needs_and_goes_on) {
  const auto segment = Segment::create(kMiB);
  Arena arena(segment);
  const Region a = arena.allocate(kMiB / 2);
  const std::string text = text_of_error(ErrorKind::kSystem, [&] { arena.allocate(kMiB); });
  CHECK(contains(text, "needs 1572864 bytes") && contains(text, "only 1048576 are reserved"));
  CHECK(contains(text, "raise PYCOLL_SEGMENT_BYTES"));
  CHECK(segment->committed() == kMiB / 2 && arena.bytes_in_use() == kMiB / 2,
        "everything is as it was");
  const Region b = arena.allocate(kMiB / 2);
  CHECK(b.offset == kMiB / 2);
  text_of_error(ErrorKind::kSystem, [&] { arena.allocate(1); });
  arena.release(a);
  arena.release(b);
  CHECK(arena.allocate(kMiB).offset == 0);
}

TEST(arena_survives_a_random_life) {
  std::mt19937 random(3);
  const auto segment = Segment::create(64 * kMiB);
  Arena arena(segment);
  std::map<size_t, Region> taken;  // what must not be given out again
  std::vector<Region> mine;
  std::vector<char> unused(2000);
  for (size_t i = 0; i < unused.size(); ++i) {
    if (!mine.empty() && random() % 2 == 0) {
      std::swap(mine[random() % mine.size()], mine.back());
      const Region region = mine.back();
      mine.pop_back();
      unused[i] = random() % 4 != 0;
      if (unused[i]) taken.erase(region.offset);
      if (unused[i] && random() % 2 == 0) {
        arena.release(region);
      } else {
        arena.release_when(region, [&unused, i] { return unused[i] != 0; });
      }
      continue;
    }
    const Region region = arena.allocate(1 + random() % (5 * kGrain));
    CHECK(region.offset % kGrain == 0 && region.offset + region.nbytes <= segment->committed());
    const auto next = taken.lower_bound(region.offset);
    CHECK(next == taken.end() || next->first >= region.offset + region.nbytes, "regions overlap");
    CHECK(next == taken.begin() ||
              std::prev(next)->first + std::prev(next)->second.nbytes <= region.offset,
          "regions overlap");
    taken[region.offset] = region;
    mine.push_back(region);
  }
  for (const Region& region : mine) arena.release(region);
  unused.assign(unused.size(), 1);
  const size_t committed = segment->committed();
  arena.allocate(
      committed);  // fits only when all that was pending has come back, next to each other
  CHECK(arena.bytes_in_use() == committed && segment->committed() == committed);
}

TEST(arena_from_several_threads) {
  Arena arena(Segment::create(64 * kMiB));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&arena, t] {
      for (int i = 0; i < 300; ++i) {
        const Region region = arena.allocate(static_cast<size_t>(i % 5 + 1) * kGrain);
        std::byte* bytes = arena.address(region);
        std::memset(bytes, t, region.nbytes);
        bool mine = true;
        for (size_t k = 0; k < region.nbytes; k += 512)
          mine &= bytes[k] == static_cast<std::byte>(t);
        CHECK(mine, "two threads were given the same bytes");
        if (i % 2 == 0) {
          arena.release(region);
        } else {
          arena.release_when(region, [] { return true; });
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// ---- segment

TEST(segment_cannot_shrink_and_is_zero) {
  const auto segment = Segment::create(16 * kMiB);
  CHECK((fcntl(segment->fd(), F_GET_SEALS) & F_SEAL_SHRINK) != 0);
  segment->commit(2 * kGrain);
  CHECK(segment->committed() == 2 * kGrain);
  segment->commit(kGrain);
  CHECK(segment->committed() == 2 * kGrain, "committing less changes nothing");
  CHECK(ftruncate(segment->fd(), 0) != 0 && errno == EPERM);
  for (size_t i = 0; i < 2 * kGrain; ++i) CHECK(segment->base()[i] == std::byte{0});
  const std::string text = text_of_error(ErrorKind::kSystem, [&] { segment->commit(17 * kMiB); });
  CHECK(contains(text, "needs 17825792 bytes") && contains(text, "PYCOLL_SEGMENT_BYTES"));
}

TEST(segment_is_seen_by_a_peer_as_it_grows) {
  const auto segment = Segment::create(16 * kMiB);
  segment->commit(kGrain);
  const auto peer = Segment::map_peer(UniqueFd(dup(segment->fd())), segment->reserved());
  CHECK(peer->base() != segment->base() && peer->reserved() == segment->reserved());
  segment->base()[5] = std::byte{7};
  CHECK(peer->base()[5] == std::byte{7});
  segment->commit(3 * kGrain);
  peer->base()[2 * kGrain] = std::byte{9};
  CHECK(segment->base()[2 * kGrain] == std::byte{9});
}

TEST(segment_of_a_peer_must_be_sealed) {
  const UniqueFd unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(contains(text_of_error(ErrorKind::kSystem, [&] { Segment::map_peer(unsealed, kMiB); }),
                 "not a sealed pycoll segment"));
  int pipe_fds[2];
  CHECK(pipe(pipe_fds) == 0);
  const UniqueFd in(pipe_fds[0]), out(pipe_fds[1]);
  text_of_error(ErrorKind::kSystem, [&] { Segment::map_peer(in, kMiB); });
}

TEST(segment_says_why_the_system_gives_no_memory) {
  const auto segment = Segment::create(16 * kMiB);
  segment->commit(kGrain);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit little{kGrain, before.rlim_max};
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &little);
  const std::string text = text_of_error(ErrorKind::kSystem, [&] { segment->commit(4 * kGrain); });
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, handler);
  CHECK(contains(text, "cannot add 12288 bytes to the 4096 bytes of shared memory") &&
        contains(text, "ulimit -f"));
  CHECK(segment->committed() == kGrain);
  segment->commit(4 * kGrain);
  CHECK(segment->committed() == 4 * kGrain);
}

// ---- endpoint

namespace {

constexpr size_t kSegmentBytes = 16 * kMiB;

// What a group's rendezvous does: greetings to all, then connect. `secret` is this rank's idea of it.
std::vector<std::shared_ptr<Peer>> connect(Exchange& exchange, Endpoint& endpoint,
                                           const Token& secret, Deadline deadline) {
  BlobWriter greeting;
  endpoint.write_greeting(&greeting);
  const std::vector<Blob> blobs = exchange.all_gather(greeting.take(), soon(), nullptr);
  std::vector<BlobReader> readers;
  for (size_t r = 0; r < blobs.size(); ++r) readers.emplace_back(blobs[r], static_cast<int>(r));
  return endpoint.connect(&readers, exchange.rank(), secret, deadline, nullptr);
}

struct Shared {
  std::atomic<uint64_t> signal;
  uint64_t value;
};

}  // namespace

TEST(endpoints_of_one_process_share_a_mapping) {
  const auto a = Endpoint::create(kSegmentBytes), b = Endpoint::create(kSegmentBytes);
  CHECK(a->id() != b->id() && !a->forked());
  std::vector<Blob> blobs(2);
  BlobWriter greetings[2];
  a->write_greeting(&greetings[0]);
  b->write_greeting(&greetings[1]);
  blobs[0] = greetings[0].take();
  blobs[1] = greetings[1].take();
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<BlobReader> readers = {{blobs[0], 0}, {blobs[1], 1}};
    const auto peers = (rank == 0 ? a : b)->connect(&readers, rank, Token{}, soon(), nullptr);
    CHECK(peers.size() == 2 && peers[static_cast<size_t>(rank)] == nullptr);
    const auto& peer = peers[static_cast<size_t>(1 - rank)];
    const auto& other = rank == 0 ? b : a;
    CHECK(peer->bell() == other->bell() && peer->segment->base() == other->base() &&
          peer->id == other->id());
    CHECK(peer->liveness == nullptr && peer->alive());
  }
  CHECK(a->num_peers() == 1 && b->num_peers() == 1);
}

TEST(endpoints_of_two_processes_see_each_other) {
  run_two_processes([](Exchange& exchange) {
    const auto endpoint = Endpoint::create(kSegmentBytes);
    const Region region = endpoint->arena().allocate(sizeof(Shared));
    auto* mine = new (endpoint->arena().address(region)) Shared{};
    const auto peers = connect(exchange, *endpoint, Token{1}, soon());
    const auto& peer = peers[static_cast<size_t>(1 - exchange.rank())];
    CHECK(peer->liveness != nullptr && peer->alive() && endpoint->num_peers() == 1);
    CHECK(connect(exchange, *endpoint, Token{2},
                  soon())[static_cast<size_t>(1 - exchange.rank())] == peer,
          "connected once");
    // Each has allocated the same, so the peer's lies at the same offset.
    auto* other = reinterpret_cast<Shared*>(peer->segment->base() + region.offset);
    for (uint64_t round = 1; round <= 200; ++round) {
      mine->value = round * 7 + static_cast<uint64_t>(exchange.rank());
      mine->signal.store(2 * round - 1, std::memory_order_seq_cst);
      peer->bell()->ring_sleepers();
      const auto await = [&](uint64_t target) {
        const Deadline deadline = soon();
        while (other->signal.load(std::memory_order_acquire) < target && !deadline.passed()) {
          endpoint->bell()->sleep_unless(
              [&] { return other->signal.load(std::memory_order_seq_cst) >= target; },
              std::chrono::seconds(1));
        }
      };
      await(2 * round - 1);
      CHECK(other->value == round * 7 + static_cast<uint64_t>(1 - exchange.rank()));
      mine->signal.store(2 * round, std::memory_order_seq_cst);  // has been read
      peer->bell()->ring_sleepers();
      await(2 * round);
    }
    exchange.all_gather({}, soon(), nullptr);
  });
}

TEST(endpoint_notices_the_death_of_a_process) {
  run_two_processes(
      [](Exchange& exchange) {
        const auto endpoint = Endpoint::create(kSegmentBytes);
        const auto peers = connect(exchange, *endpoint, Token{1}, soon());
        exchange.all_gather({}, soon(), nullptr);
        if (exchange.rank() == 1) kill(getpid(), SIGKILL);
        const auto& peer = peers[1];
        const Deadline deadline = soon();
        while (peer->alive() && !deadline.passed())
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        CHECK(!peer->alive());
        peer->bell()->ring();  // its memory is still there
      },
      true);
}

TEST(endpoint_lets_nobody_in_who_does_not_know_the_secret) {
  run_two_processes([](Exchange& exchange) {
    const auto endpoint = Endpoint::create(kSegmentBytes);
    const bool caller = exchange.rank() == 1;  // a rank calls those below it
    const Token secret{static_cast<uint8_t>(caller ? 1 : 2)};
    const std::string text =
        text_of_error(caller ? ErrorKind::kPeerFailed : ErrorKind::kTimeout,
                      [&] { connect(exchange, *endpoint, secret, soon(caller ? 10000 : 400)); });
    CHECK(contains(text, caller ? "making a group with rank 0" : "Timed out waiting for rank 1"));
    CHECK(endpoint->num_peers() == 0);
    exchange.all_gather({}, soon(), nullptr);
    // Neither is the worse for it.
    connect(exchange, *endpoint, Token{3}, soon());
    CHECK(endpoint->num_peers() == 1);
    exchange.all_gather({}, soon(), nullptr);
  });
}

TEST(endpoint_ignores_strangers) {
  run_two_processes([](Exchange& exchange) {
    const auto endpoint = Endpoint::create(kSegmentBytes);
    std::string name = "pycoll-";
    const std::vector<Blob> ids =
        exchange.all_gather({endpoint->id().begin(), endpoint->id().end()}, soon(), nullptr);
    for (const uint8_t byte : ids[0]) {
      char hex[3];
      std::snprintf(hex, sizeof(hex), "%02x", byte);
      name += hex;
    }
    if (exchange.rank() == 1) {
      // One that hangs up, one that talks nonsense, and one that talks nonsense with a descriptor.
      connect_abstract(name);
      const UniqueFd talker = connect_abstract(name), giver = connect_abstract(name);
      const char nonsense[200] = "nonsense";
      CHECK(write(talker.get(), nonsense, sizeof(nonsense)) == sizeof(nonsense));
      send_with_fd(giver, nonsense, sizeof(nonsense), talker.get());
    }
    const auto peers = connect(exchange, *endpoint, Token{1}, soon());
    CHECK(endpoint->num_peers() == 1);
    exchange.all_gather({}, soon(), nullptr);
  });
}

TEST(endpoint_names_the_rank_that_has_ended) {
  run_two_processes([](Exchange& exchange) {
    auto endpoint = Endpoint::create(kSegmentBytes);
    BlobWriter greeting;
    endpoint->write_greeting(&greeting);
    const std::vector<Blob> blobs = exchange.all_gather(greeting.take(), soon(), nullptr);
    if (exchange.rank() == 0) endpoint.reset();
    exchange.all_gather({}, soon(), nullptr);
    if (exchange.rank() == 0) return;
    std::vector<BlobReader> readers = {{blobs[0], 0}, {blobs[1], 1}};
    const std::string text = text_of_error(
        ErrorKind::kSystem, [&] { endpoint->connect(&readers, 1, Token{1}, soon(), nullptr); });
    CHECK(contains(text, "rank 0 cannot be reached on this host"));
  });
}

TEST(endpoint_made_before_a_fork_is_not_used_after_it) {
  const auto endpoint = Endpoint::create(kSegmentBytes);
  CHECK(!endpoint->forked());
  run_two_processes(
      [&](Exchange& exchange) { CHECK(endpoint->forked() == (exchange.rank() == 1)); });
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
