// The heap of user tensors: blocks, growth, what is given back, threads; and what peers and forked children see.
#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <random>
#include <thread>

#include "check.h"
#include "memory/arena.h"
#include "memory/endpoint.h"
#include "processes.h"

using namespace pycoll;
using namespace pycoll::test;

namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kPage = SharedHeap::kPageBytes;

size_t bytes_of_file(const Segment& segment) {
  struct stat status;
  CHECK(fstat(segment.fd(), &status) == 0);
  return static_cast<size_t>(status.st_blocks) * 512;
}

uint8_t mark_of(size_t i, size_t serial) { return static_cast<uint8_t>(i * 31 + serial * 7 + 1); }

}  // namespace

TEST(blocks_lie_at_the_end_of_the_segment_and_the_arena_at_its_beginning) {
  const auto segment = Segment::create(16 * kMiB);
  SharedHeap heap(segment);
  Arena arena(segment);
  std::byte* a = heap.allocate(1);
  std::byte* b = heap.allocate(3 * kPage + 1);
  CHECK(heap.offset_of(a) == 16 * kMiB - kPage);
  CHECK(heap.offset_of(b) == 16 * kMiB - 5 * kPage);
  CHECK(arena.allocate(5).offset == 0 && segment->committed() == kPage);
  CHECK(heap.contains(a, kPage) && !heap.contains(a, kPage + 1));
  CHECK(heap.contains(b, 5 * kPage) && !heap.contains(b - 1, 1));
  int here;
  CHECK(!heap.contains(&here, sizeof(here)) && !heap.contains(segment->base(), 1));
  CHECK(heap.stats().bytes_in_use == 5 * kPage && heap.stats().num_blocks == 2);
  heap.release(a);
  heap.release(b);
  CHECK(heap.stats().bytes_in_use == 0 && heap.stats().bytes_cached == 5 * kPage);
}

TEST(heap_and_arena_do_not_meet) {
  const auto segment = Segment::create(kMiB);
  SharedHeap heap(segment);
  Arena arena(segment);
  const Region region = arena.allocate(kMiB / 2);
  std::byte* block = heap.allocate(kMiB / 4);
  const auto text_of = [](const auto& fn) {
    try {
      fn();
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kSystem);
      return std::string(error.what());
    }
    CHECK(false, "nothing was raised");
    return std::string();
  };
  std::string text = text_of([&] { heap.allocate(kMiB / 2); });
  CHECK(contains(text, "needs 524288 bytes") && contains(text, "PYCOLL_SEGMENT_BYTES"));
  text = text_of([&] { arena.allocate(kMiB / 2); });
  CHECK(contains(text, "needs 1048576 bytes") && contains(text, "only 786432 are reserved"));
  // Everything is as it was.
  CHECK(segment->committed() == kMiB / 2 && segment->ceiling() == 3 * kMiB / 4);
  std::byte* other = heap.allocate(kMiB / 4);
  CHECK(heap.offset_of(other) == region.nbytes);
  heap.release(block);
  heap.release(other);
}

TEST(a_freed_block_is_the_next_one_of_its_size) {
  const auto segment = Segment::create(64 * kMiB);
  SharedHeap heap(segment);
  std::byte* a = heap.allocate(kMiB);
  std::byte* b = heap.allocate(kMiB);
  a[5] = std::byte{77};
  heap.release(b);
  heap.release(a);
  CHECK(heap.allocate(kMiB - 5) == a && a[5] == std::byte{77}, "the newest comes first");
  CHECK(heap.allocate(kMiB) == b);
  heap.release(a);
  std::byte* small = heap.allocate(kMiB / 2);
  CHECK(small != a && heap.stats().bytes_cached == kMiB, "other sizes do not take it");
  heap.release(small);
  heap.release(b);
}

TEST(memory_goes_back_to_the_system) {
  const auto segment = Segment::create(1024 * kMiB);
  SharedHeap heap(segment);
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 20; ++i) {
    blocks.push_back(heap.allocate(16 * kMiB));
    std::fill_n(blocks.back(), 16 * kMiB, std::byte{1});
  }
  CHECK(bytes_of_file(*segment) >= 320 * kMiB);
  for (std::byte* block : blocks) heap.release(block);
  CHECK(heap.stats().bytes_cached == 320 * kMiB, "a program that goes on needs it again");
  // Half of the peak is forgotten a second.
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  heap.release(heap.allocate(1));
  const size_t most = 320 * kMiB / 4 + SharedHeap::kSpareBytes;
  CHECK(heap.stats().bytes_cached <= most, "%zu", heap.stats().bytes_cached);
  CHECK(bytes_of_file(*segment) <= most + kMiB);
  heap.trim();
  CHECK(heap.stats().bytes_cached == 0 && bytes_of_file(*segment) == 0);
  // What comes again is zero and lies where there was something, not further down.
  const size_t ceiling = segment->ceiling();
  std::byte* again = heap.allocate(300 * kMiB);
  CHECK(segment->ceiling() == ceiling);
  CHECK(std::all_of(again, again + 300 * kMiB, [](std::byte b) { return b == std::byte{0}; }));
  heap.release(again);
}

TEST(a_random_life_from_several_threads) {
  const auto segment = Segment::create(512 * kMiB);
  SharedHeap heap(segment);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      struct Block {
        std::byte* data;
        size_t nbytes, serial;
      };
      std::vector<Block> mine;
      for (size_t serial = t; serial < 1500; serial += 3) {
        if (mine.size() > 8 || (!mine.empty() && random() % 3 == 0)) {
          const size_t index = random() % mine.size();
          const Block block = mine[index];
          size_t wrong = 0;
          for (size_t i = 0; i < block.nbytes; i += 509)
            wrong += block.data[i] != std::byte{mark_of(i, block.serial)};
          CHECK(wrong == 0, "block %zu of %zu bytes", block.serial, block.nbytes);
          heap.release(block.data);
          mine.erase(mine.begin() + static_cast<ptrdiff_t>(index));
          if (random() % 50 == 0) heap.trim();
          continue;
        }
        const size_t nbytes = 1 + random() % (random() % 4 == 0 ? 4 * kMiB : 64 * kPage);
        std::byte* data = heap.allocate(nbytes);
        CHECK(heap.contains(data, nbytes));
        for (size_t i = 0; i < nbytes; i += 509) data[i] = std::byte{mark_of(i, serial)};
        mine.push_back(Block{data, nbytes, serial});
      }
      for (const Block& block : mine) heap.release(block.data);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(heap.stats().bytes_in_use == 0 && heap.stats().num_blocks == 0);
  heap.trim();
  CHECK(bytes_of_file(*segment) == 0);
}

TEST(a_peer_sees_blocks_that_are_made_after_it_has_connected) {
  run_two_processes([](Exchange& exchange) {
    const Deadline deadline = Deadline::after(std::chrono::seconds(10));
    const auto endpoint = Endpoint::create(256 * kMiB);
    BlobWriter greeting;
    endpoint->write_greeting(&greeting);
    const std::vector<Blob> blobs = exchange.all_gather(greeting.take(), deadline, nullptr);
    std::vector<BlobReader> readers;
    for (size_t r = 0; r < blobs.size(); ++r) readers.emplace_back(blobs[r], static_cast<int>(r));
    const auto peers = endpoint->connect(&readers, exchange.rank(), Token{}, deadline, nullptr);
    const int other = 1 - exchange.rank();
    for (size_t serial = 0; serial < 3; ++serial) {
      std::byte* mine = endpoint->heap().allocate(kMiB);
      const size_t id = serial * 2 + static_cast<size_t>(exchange.rank());
      for (size_t i = 0; i < kMiB; ++i) mine[i] = std::byte{mark_of(i, id)};
      BlobWriter where;
      where.put(static_cast<uint64_t>(endpoint->heap().offset_of(mine)));
      const std::vector<Blob> all = exchange.all_gather(where.take(), deadline, nullptr);
      BlobReader reader(all[static_cast<size_t>(other)], other);
      const std::byte* theirs =
          peers[static_cast<size_t>(other)]->segment->base() + reader.get<uint64_t>();
      size_t wrong = 0;
      const size_t their_id = serial * 2 + static_cast<size_t>(other);
      for (size_t i = 0; i < kMiB; ++i) wrong += theirs[i] != std::byte{mark_of(i, their_id)};
      CHECK(wrong == 0, "%zu bytes differ", wrong);
      exchange.all_gather(Blob{}, deadline, nullptr);
    }
  });
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
