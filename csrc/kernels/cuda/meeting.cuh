// How a kernel begins: every rank tells every rank that it has come, and compares what they have come for.
//
// A rank's control memory has an entry for each parity of the epoch and each source. Block 0 of the source writes it: fingerprint,
// factor of PREMUL_SUM, bytes that it is going to send (relaxed), then the epoch (release). Every block waits for the entries of
// all ranks (acquire) and compares. The wait does more than compare:
//
// - A rank sends its entry of epoch k in a kernel that begins after its kernel of k - 1 has ended. So a block that has met all
//   ranks knows that nobody reads or writes staging memory for an earlier operation any more. Kernels of all kinds share it
//   freely and begin with empty slots; signals that hold the epoch need no reset.
// - Two parities suffice: a rank writes its entry of k + 2 after it has met all in k + 1, and a peer came to that meeting after
//   its kernel of k had ended, whose blocks all had read the entry of k.
//
// Only block 0 sends and blocks of one number only talk to one another, so blocks need not run all at once.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/peer_access.cuh"
#include "kernels/cuda/signals.cuh"
#include "kernels/cuda/thread_group.cuh"

namespace pycoll::cuda {

// ---- epochs
//
// Blocks of a grid that shared one counter would have to agree on when the last of them has read it. So there are kMaxBlocks equal
// words: block b reads word b when it starts, and when it ends sets the words b, b + num_blocks, b + 2 num_blocks, ..., of which
// no other block of its grid reads one. All words are equal between kernels, whatever the sizes of the grids.

PYCOLL_DEVICE uint32_t next_epoch(const uint32_t* epochs) {
  return peer::load_relaxed(epochs + block_index()) + 1;
}

// When every thread of the block has read the epoch.
PYCOLL_DEVICE void end_epoch(const BlockGroup& block, uint32_t* epochs, uint32_t epoch) {
  for (int i = block_index() + block.thread_rank() * num_blocks(); i < kMaxBlocks;
       i += block.num_threads() * num_blocks())
    peer::store_relaxed(epochs + i, epoch);
}

// ---- peers

// A rank that this one sends to and receives from.
PYCOLL_DEVICE bool is_peer(const Group& group, const PeerTable& memory, int rank) {
  return rank < group.world_size && rank != group.rank && memory.of_rank[rank] != nullptr;
}

// ---- the meeting

struct MeetingEntry {
  uint64_t fingerprint;
  uint64_t factor;  // the bits of a double
  uint64_t nbytes;
  uint32_t epoch;
};
static_assert(sizeof(MeetingEntry) == kMeetingBytes);

// What a rank says of itself, and what it expects. Null: nothing.
struct MeetingTerms {
  double factor = 1.0;
  const size_t* send_bytes = nullptr;     // to each rank
  const size_t* receive_bytes = nullptr;  // from each rank
};

class Meeting {
 public:
  PYCOLL_DEVICE Meeting(const Group& group, const BlockGroup& block)
      : group_(group), block_(block), epoch_(next_epoch(group.epochs)) {}

  PYCOLL_DEVICE uint32_t epoch() const { return epoch_; }

  // False, on every thread of the block, if a rank does not come or wants something else. `factors`, of kMaxRanks, are every
  // rank's afterwards; null if they are not needed.
  PYCOLL_DEVICE bool begin(const MeetingTerms& terms, double* factors) const {
    if (!block_.all(!aborted(group_.watch))) return false;
    if (block_index() == 0) send(terms);
    bool all_came = true;
    for (int rank = block_.thread_rank(); rank < group_.world_size; rank += block_.num_threads()) {
      double factor = terms.factor;
      if (is_peer(group_, group_.control, rank)) all_came &= meet(rank, terms, factor);
      if (factors != nullptr) factors[rank] = factor;
    }
    return block_.all(all_came);
  }

  PYCOLL_DEVICE void end() const {
    block_.sync();
    end_epoch(block_, group_.epochs, epoch_);
  }

 private:
  PYCOLL_DEVICE MeetingEntry* entry(int dst, int src) const {
    return static_cast<MeetingEntry*>(group_.control.of_rank[dst]) +
           epoch_ % 2 * static_cast<unsigned>(group_.world_size) + src;
  }

  PYCOLL_DEVICE void send(const MeetingTerms& terms) const {
    for (int dst = block_.thread_rank(); dst < group_.world_size; dst += block_.num_threads()) {
      if (!is_peer(group_, group_.control, dst)) continue;
      MeetingEntry* const to = entry(dst, group_.rank);
      peer::store_relaxed(&to->fingerprint, group_.fingerprint);
      peer::store_relaxed(&to->factor, bits_from_double(terms.factor));
      if (terms.send_bytes != nullptr)
        peer::store_relaxed(&to->nbytes, static_cast<uint64_t>(terms.send_bytes[dst]));
      peer::store_release(&to->epoch, epoch_);
    }
  }

  PYCOLL_DEVICE bool meet(int src, const MeetingTerms& terms, double& factor) const {
    const MeetingEntry* const from = entry(group_.rank, src);
    if (!wait_reached(&from->epoch, epoch_, Phase::kMeeting, src, group_.watch)) return false;
    if (!is_as_expected(src, group_.fingerprint, peer::load_relaxed(&from->fingerprint)))
      return false;
    factor = double_from_bits(peer::load_relaxed(&from->factor));
    return terms.receive_bytes == nullptr ||
           is_as_expected(src, terms.receive_bytes[src], peer::load_relaxed(&from->nbytes));
  }

  // All blocks find the same; block 0 reports it. The others must not: that would keep a block 0 which has not begun from
  // sending, and the peers from finding out.
  PYCOLL_DEVICE bool is_as_expected(int src, uint64_t expected, uint64_t seen) const {
    if (seen != expected && block_index() == 0)
      report_failure(group_.watch, FailureKind::kMismatch, Phase::kMeeting, src, expected, seen);
    return seen == expected;
  }

  const Group& group_;
  const BlockGroup& block_;
  const uint32_t epoch_;
};

// ---- signals that hold the epoch

// Grows from step to step of an operation and from operation to operation.
PYCOLL_DEVICE uint64_t signal_value(uint32_t epoch, uint32_t step) {
  return uint64_t{epoch} << 32 | step;
}

}  // namespace pycoll::cuda
