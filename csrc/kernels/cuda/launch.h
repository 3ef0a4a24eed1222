// What the host knows of the CUDA kernels: their arguments, the memory they need, and how to launch them. Plain C++; torch-free.
//
// A group's kernels run one after another on each rank (one stream, or streams ordered by events), in the same order on all
// ranks, with equal arguments except for what is described as a rank's own. docs/kernels.md says what each kernel promises.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "topology/partition.h"

namespace pycoll::cuda {

// The GPUs that one NVLink network joins.
inline constexpr int kMaxRanks = 72;
inline constexpr int kMaxBlocks = 128;

// A part of some memory of each rank, at the address where this rank sees it. Null for a rank that takes no part.
struct PeerTable {
  void* of_rank[kMaxRanks] = {};
};

struct LaunchConfig {
  int num_blocks = 1;
  int threads_per_block = 256;
};

// Where a kernel was when a wait failed.
enum class Phase : uint32_t {
  kNone,
  kBarrier,
  kAllReduceOneShotHeader,
  kAllReduceOneShotData,
};

inline constexpr const char* name(Phase phase) {
  switch (phase) {
    case Phase::kNone:
      return "none";
    case Phase::kBarrier:
      return "barrier";
    case Phase::kAllReduceOneShotHeader:
      return "all_reduce_one_shot, headers";
    case Phase::kAllReduceOneShotData:
      return "all_reduce_one_shot, data";
  }
  return "unknown";
}

enum class FailureKind : uint32_t {
  kNone,
  kDeadline,  // `peer` did not come in time: `expected` is the value waited for, `seen` the last one read
  kMismatch,  // `peer` called something else: its fingerprint is `seen`
};

// Says why a kernel gave up. The first thread that gives up writes it, once; `kind` last (release), so that a host that polls it
// finds the rest. Zero at rest.
struct FailureRecord {
  uint32_t kind = 0;  // FailureKind
  uint32_t phase = 0;
  int32_t rank = 0;  // who waited
  int32_t peer = 0;
  uint64_t expected = 0;
  uint64_t seen = 0;
};

inline constexpr uint64_t kNoTimeout = UINT64_MAX;

// What bounds the waits of a kernel. When one of them expires, its thread writes the record and sets the abort word, and all
// threads of the grid return. Nothing is written to outputs after that, but some of it may have been written before.
struct Watch {
  int rank = 0;
  uint64_t timeout_ns = kNoTimeout;  // of each wait
  // In this rank's own memory; kernels that find it set return at once. Not zero: a wait has failed, or the host aborts.
  uint32_t* abort = nullptr;
  FailureRecord* record = nullptr;  // the host's memory, mapped
};

// ---- barrier

struct BarrierArgs {
  int rank = 0;
  int world_size = 0;
  // uint32_t[world_size] of each rank, 128-byte aligned, zero at first. Word r of a rank's signals is written by rank r only.
  PeerTable signals;
  uint32_t* epoch = nullptr;  // this rank's count of barriers, zero at first
  Watch watch;
};

// What a rank wrote before it (in stream order) is seen by every rank's kernels after it. One block.
void launch_barrier(const BarrierArgs& args, LaunchConfig config, void* stream);

// ---- LL scratch: mailboxes of packets that carry their own flags (ll.cuh)

inline constexpr size_t kUnitBytes = 16;     // of user data: what one thread handles at once
inline constexpr size_t kPacketBytes = 16;   // of which 8 are data
inline constexpr size_t kHeaderPackets = 8;  // of which 2 are used; the rest keeps lines together

// Packets that one rank sends to another in one epoch, when data has at most `capacity_units` units.
PYCOLL_HOST_DEVICE constexpr size_t ll_stripe_packets(size_t capacity_units) {
  return kHeaderPackets + 2 * capacity_units;
}

// Two epochs, a stripe for each source.
constexpr size_t ll_scratch_bytes(int world_size, size_t capacity_units) {
  return 2 * static_cast<size_t>(world_size) * ll_stripe_packets(capacity_units) * kPacketBytes;
}

// ---- all_reduce_one_shot

struct AllReduceOneShotArgs {
  const void* input = nullptr;
  void* output = nullptr;  // the same as input, or memory that does not overlap it
  size_t numel = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int divisor = 0;      // AVG: usually the number of ranks
  double factor = 1.0;  // PREMUL_SUM: this rank's own
  // A hash of what all ranks must agree on. It is compared before any output is written.
  uint64_t fingerprint = 0;
  int rank = 0;
  int world_size = 0;
  PeerTable scratch;  // ll_scratch_bytes(world_size, capacity_units) of each rank, 128-byte aligned, zero at first
  size_t capacity_units = 0;  // a multiple of 8
  // uint32_t[kMaxBlocks] of this rank, zero at first: the number of the last operation, once for each block.
  uint32_t* epochs = nullptr;
  Watch watch;
};

// output = input of rank 0 op input of rank 1 op ...: in rank order, in the accumulate type, rounded once; the same bits on
// all ranks.
void launch_all_reduce_one_shot(const AllReduceOneShotArgs& args, LaunchConfig config,
                                void* stream);

}  // namespace pycoll::cuda
