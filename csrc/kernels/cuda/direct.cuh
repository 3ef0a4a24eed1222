// Direct kernels: every rank writes what another one is to have into a slot of that rank's memory, then raises a signal there.
//
// Block b of a rank works with the blocks b of the others and has slots and signals of its own. An *area* has one slot and one
// signal for each source. Data is cut into segments as large as a slot; block b takes segments b, b + num_blocks, ...; the j-th of
// these is the block's *iteration* j. A signal holds epoch and number of iterations done (meeting.cuh).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/meeting.cuh"
#include "kernels/cuda/peer_access.cuh"
#include "kernels/cuda/signals.cuh"
#include "kernels/cuda/thread_group.cuh"

namespace pycoll::cuda {

// The segments of a chunk that one block works on.
class BlockSegments {
 public:
  PYCOLL_DEVICE BlockSegments(size_t num_units, size_t segment_units)
      : num_units_(num_units), segment_units_(segment_units) {}

  // Whether the block has a segment in this iteration; if not, it has none in those that follow.
  PYCOLL_DEVICE bool has(size_t iteration) const { return segment(iteration).numel > 0; }
  // Of the units of the chunk; empty beyond its end.
  PYCOLL_DEVICE Range segment(size_t iteration) const {
    const size_t index =
        iteration * static_cast<size_t>(num_blocks()) + static_cast<size_t>(block_index());
    const size_t begin = index * segment_units_;
    if (begin >= num_units_) return {num_units_, 0};
    const size_t rest = num_units_ - begin;
    return {begin, rest < segment_units_ ? rest : segment_units_};
  }

 private:
  size_t num_units_;
  size_t segment_units_;
};

class DirectLanes {
 public:
  PYCOLL_DEVICE DirectLanes(const Group& group, const DirectStaging& staging,
                            const BlockGroup& block, uint32_t epoch)
      : group_(group), staging_(staging), block_(block), epoch_(epoch) {}

  PYCOLL_DEVICE bool is_peer(int rank) const { return cuda::is_peer(group_, staging_.slots, rank); }
  // Where `src` leaves data for `dst`.
  PYCOLL_DEVICE Vector16* slot(int area, int dst, int src) const {
    const auto world_size = static_cast<size_t>(group_.world_size);
    const size_t place = static_cast<size_t>(area) * static_cast<size_t>(num_blocks()) +
                         static_cast<size_t>(block_index());
    return static_cast<Vector16*>(staging_.slots.of_rank[dst]) +
           (place * world_size + static_cast<size_t>(src)) * staging_.slot_units;
  }

  // Every thread's stores to slots, and its loads from own slots, are over for the peers that see the signal. `is_wanted(peer)`
  // says whom to tell.
  template <class IsWanted>
  PYCOLL_DEVICE void post(int area, uint32_t iterations, IsWanted is_wanted) const {
    block_.sync();
    for (int dst = block_.thread_rank(); dst < group_.world_size; dst += block_.num_threads()) {
      if (is_peer(dst) && is_wanted(dst))
        peer::store_release(signal(area, dst, group_.rank), signal_value(epoch_, iterations));
    }
  }
  // Until the peers have posted as much. False, on every thread of the block, if one does not.
  template <class IsWanted>
  PYCOLL_DEVICE bool wait(int area, uint32_t iterations, Phase phase, IsWanted is_wanted) const {
    bool all_came = true;
    for (int src = block_.thread_rank(); src < group_.world_size; src += block_.num_threads()) {
      if (is_peer(src) && is_wanted(src))
        all_came &= wait_reached(signal(area, group_.rank, src), signal_value(epoch_, iterations),
                                 phase, src, group_.watch);
    }
    return block_.all(all_came);
  }

 private:
  PYCOLL_DEVICE uint64_t* signal(int area, int dst, int src) const {
    return static_cast<uint64_t*>(staging_.signals.of_rank[dst]) +
           (area * kMaxBlocks + block_index()) * group_.world_size + src;
  }

  const Group& group_;
  const DirectStaging& staging_;
  const BlockGroup& block_;
  const uint32_t epoch_;
};

struct Everybody {
  PYCOLL_DEVICE bool operator()(int) const { return true; }
};

// ---- reductions in rank order

// `load(rank)` gives that rank's unit, and `takes_part(rank)` whether it has one.
template <class Element, class TakesPart, class Load>
PYCOLL_DEVICE Vector16 reduce_in_rank_order(const Reduction& reduction, const double* factors,
                                            int world_size, TakesPart takes_part, Load load) {
  Accumulator<Element> result;
  bool is_first = true;
  for (int rank = 0; rank < world_size; ++rank) {
    if (!takes_part(rank)) continue;
    Accumulator<Element> term = widen<Element>(load(rank));
    if (reduction.op == ReduceOp::kPremulSum) scale(term, factors[rank]);
    if (is_first) {
      result = term;
    } else {
      combine(reduction.op, result, term);
    }
    is_first = false;
  }
  if (reduction.op == ReduceOp::kAvg) divide(result, reduction.divisor);
  return narrow<Element>(result);
}

}  // namespace pycoll::cuda
