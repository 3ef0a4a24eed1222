// Cutting tensors and the schedule of the ring: pure arithmetic, checked against what is claimed of it.
#include <cstdint>
#include <set>

#include "check.h"
#include "topology/ring.h"

using namespace pycoll;

TEST(parts_cover_everything_once_and_in_order) {
  for (size_t numel = 0; numel < 70; ++numel) {
    for (size_t parts = 1; parts < 12; ++parts) {
      size_t end = 0, least = SIZE_MAX, most = 0;
      for (size_t i = 0; i < parts; ++i) {
        const Range range = part(numel, parts, i);
        CHECK(range.begin == end, "part %zu of %zu in %zu", i, numel, parts);
        end = range.begin + range.numel;
        least = std::min(least, range.numel);
        most = std::max(most, range.numel);
        // The longer parts come first: what part 0 has is the most.
        CHECK(range.numel <= part(numel, parts, 0).numel);
      }
      CHECK(end == numel, "%zu in %zu parts ends at %zu", numel, parts, end);
      CHECK(most - least <= 1);
    }
  }
}

TEST(parts_of_sizes_beyond_32_bits) {
  const size_t numel = (size_t{1} << 40) + 5;
  size_t end = 0;
  for (size_t i = 0; i < 7; ++i) {
    const Range range = part(numel, 7, i);
    CHECK(range.begin == end);
    end += range.numel;
  }
  CHECK(end == numel);
}

TEST(rounding) {
  CHECK(ceil_div(0, 4) == 0 && ceil_div(1, 4) == 1 && ceil_div(4, 4) == 1 && ceil_div(5, 4) == 2);
  CHECK(round_up(0, 64) == 0 && round_up(1, 64) == 64 && round_up(64, 64) == 64 &&
        round_up(65, 64) == 128);
}

TEST(neighbours) {
  for (int n = 1; n < 12; ++n) {
    std::set<int> seen;
    int rank = 0;
    for (int i = 0; i < n; ++i, rank = ring::next(rank, n)) {
      seen.insert(rank);
      CHECK(ring::previous(ring::next(rank, n), n) == rank &&
            ring::next(ring::previous(rank, n), n) == rank);
    }
    CHECK(rank == 0 && static_cast<int>(seen.size()) == n, "n=%d: once around meets each rank once",
          n);
  }
}

TEST(all_reduce_schedule) {
  for (int n = 2; n < 12; ++n) {
    for (int rank = 0; rank < n; ++rank) {
      const int previous = ring::previous(rank, n);
      for (int step = 1; step < 2 * n - 1; ++step) {
        CHECK(
            ring::all_reduce_chunk(rank, step, n) == ring::all_reduce_chunk(previous, step - 1, n),
            "n=%d rank=%d: what step %d receives was sent in step %d", n, rank, step, step - 1);
      }
      CHECK(ring::all_reduce_chunk(rank, 0, n) == previous,
            "n=%d rank=%d starts the chunk before its own", n, rank);
      CHECK(ring::all_reduce_chunk(rank, n - 1, n) == rank, "n=%d rank=%d completes its own chunk",
            n, rank);
    }
    for (int chunk = 0; chunk < n; ++chunk) {
      // The chunk's way: which rank handles it in a step. There is exactly one.
      std::vector<int> way;
      for (int step = 0; step < 2 * n - 1; ++step) {
        for (int rank = 0; rank < n; ++rank) {
          if (ring::all_reduce_chunk(rank, step, n) == chunk) way.push_back(rank);
        }
        CHECK(way.size() == static_cast<size_t>(step + 1), "n=%d chunk=%d step=%d", n, chunk, step);
      }
      if (way.size() != static_cast<size_t>(2 * n - 1)) continue;
      const auto middle = way.begin() + n;
      CHECK(way[0] == ring::next(chunk, n) && way[static_cast<size_t>(n - 1)] == chunk);
      CHECK(std::set<int>(way.begin(), middle).size() == static_cast<size_t>(n),
            "n=%d chunk=%d: each rank adds once", n, chunk);
      CHECK(std::set<int>(middle - 1, way.end()).size() == static_cast<size_t>(n),
            "n=%d chunk=%d: each rank gets it", n, chunk);
    }
  }
}

TEST(all_gather_schedule) {
  for (int n = 2; n < 12; ++n) {
    for (int rank = 0; rank < n; ++rank) {
      std::set<int> chunks;
      for (int step = 0; step < n; ++step) {
        const int chunk = ring::all_gather_chunk(rank, step, n);
        CHECK(chunk >= 0 && chunk < n);
        chunks.insert(chunk);
        if (step > 0) CHECK(chunk == ring::all_gather_chunk(ring::previous(rank, n), step - 1, n));
      }
      CHECK(ring::all_gather_chunk(rank, 0, n) == rank);
      CHECK(chunks.size() == static_cast<size_t>(n), "n=%d rank=%d gets every chunk", n, rank);
    }
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
