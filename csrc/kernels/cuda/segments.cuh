// How a block finds its part of every rank's chunk, and goes through it: what all kernels that meet have in common.
//
// A chunk is cut into segments as large as a slot of staging memory; block b takes segments b, b + num_blocks, ...; the j-th of
// these is the block's *iteration* j. Sizes are counted in blocks of the wire (wire.cuh): units of 16 bytes, where elements travel
// as they are. All ranks go through as many iterations as the largest chunk has, so that their counters agree.
#pragma once

#include <cstddef>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/meeting.cuh"
#include "kernels/cuda/thread_group.cuh"

namespace pycoll::cuda {

// The segments of a chunk that one block works on.
class BlockSegments {
 public:
  PYCOLL_DEVICE BlockSegments(size_t chunk_numel, size_t segment_numel)
      : chunk_numel_(chunk_numel), segment_numel_(segment_numel) {}

  // Whether the block has a segment in this iteration; if not, it has none in those that follow.
  PYCOLL_DEVICE bool has(size_t iteration) const { return segment(iteration).numel > 0; }
  // Of the chunk; empty beyond its end.
  PYCOLL_DEVICE Range segment(size_t iteration) const {
    const size_t index =
        iteration * static_cast<size_t>(num_blocks()) + static_cast<size_t>(block_index());
    const size_t begin = index * segment_numel_;
    if (begin >= chunk_numel_) return {chunk_numel_, 0};
    const size_t rest = chunk_numel_ - begin;
    return {begin, rest < segment_numel_ ? rest : segment_numel_};
  }

 private:
  size_t chunk_numel_;
  size_t segment_numel_;
};

// Of data that is cut into equal chunks, one a rank.
class PartSegments {
 public:
  PYCOLL_DEVICE PartSegments(size_t numel, int world_size, size_t segment_numel)
      : chunks_(numel, static_cast<size_t>(world_size)), segment_numel_(segment_numel) {}

  // The first chunk is the largest.
  PYCOLL_DEVICE BlockSegments largest() const { return {chunks_.part(0).numel, segment_numel_}; }
  // Of the whole data.
  PYCOLL_DEVICE Range segment(int rank, size_t iteration) const {
    const Range chunk = chunks_.part(static_cast<size_t>(rank));
    Range segment = BlockSegments(chunk.numel, segment_numel_).segment(iteration);
    segment.begin += chunk.begin;
    return segment;
  }

 private:
  Partition chunks_;
  size_t segment_numel_;
};

// Of chunks that the caller has cut. `count(rank)` says how many blocks of the wire a rank's chunk has.
template <class Count>
class TableSegments {
 public:
  PYCOLL_DEVICE TableSegments(int world_size, size_t segment_numel, Count count)
      : world_size_(world_size), segment_numel_(segment_numel), count_(count) {}

  PYCOLL_DEVICE BlockSegments largest() const {
    size_t largest = 0;
    for (int rank = 0; rank < world_size_; ++rank)
      if (count_(rank) > largest) largest = count_(rank);
    return {largest, segment_numel_};
  }
  // Of the rank's chunk.
  PYCOLL_DEVICE Range segment(int rank, size_t iteration) const {
    return BlockSegments(count_(rank), segment_numel_).segment(iteration);
  }

 private:
  const int world_size_;
  const size_t segment_numel_;
  const Count count_;
};

// A kernel: it meets the other ranks, calls `iterate(lanes, j)` until the block has no segment of the largest chunk, and ends
// its epoch. `iterate` gives false when a wait has failed. `factors` as of Meeting::begin.
template <class Lanes, class Args, class Iterate>
PYCOLL_DEVICE void run_iterations(const Args& args, const MeetingTerms& terms, double* factors,
                                  const BlockSegments& largest, Iterate iterate) {
  const BlockGroup block;
  const Meeting meeting(args.group, block);
  if (!meeting.begin(terms, factors)) return;
  Lanes lanes(args.group, args.staging, block, meeting.epoch());
  for (size_t j = 0; largest.has(j); ++j)
    if (!iterate(lanes, j)) return;
  meeting.end();
}

}  // namespace pycoll::cuda
