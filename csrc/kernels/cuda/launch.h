// What the host knows of the collective kernels: their arguments, the memory they need, and how to launch them. Plain C++;
// torch-free. bucket.h has the kernels that know no ranks.
//
// A group's kernels run one after another on each rank (one stream, or streams ordered by events), in the same order on all
// ranks, with equal arguments and equal grids except for what is described as a rank's own. docs/kernels.md says what each
// kernel promises.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "kernels/cuda/failure.h"
#include "topology/partition.h"

namespace pycoll::cuda {

// The GPUs that one NVLink network joins.
inline constexpr int kMaxRanks = 72;
inline constexpr int kMaxBlocks = 128;

// A part of some memory of each rank, at the address where this rank sees it. Null for a rank that takes no part, which barrier and
// all_reduce_one_shot allow; the others share out their work among all ranks.
struct PeerTable {
  void* of_rank[kMaxRanks] = {};
};

struct LaunchConfig {
  int num_blocks = 1;
  int threads_per_block = 256;  // a multiple of 32
};

// A chunk of a rank: elements, or bytes where a kernel moves without looking.
struct ChunkTable {
  size_t begin[kMaxRanks] = {};
  size_t numel[kMaxRanks] = {};
};

// ---- what all kernels of a group share

inline constexpr size_t kLineBytes = 128;
inline constexpr size_t kUnitBytes = 16;  // of user data: what one thread handles at once

// A rank's place in its group, and where the group meets (meeting.cuh).
struct Group {
  int rank = 0;
  int world_size = 0;
  // A hash of what all ranks must agree on. It is compared before any output is written.
  uint64_t fingerprint = 0;
  // control_bytes(world_size) of each rank, 128-byte aligned, zero at first.
  PeerTable control;
  // uint32_t[kMaxBlocks] of this rank, zero at first: the number of the last operation, once for each block.
  uint32_t* epochs = nullptr;
  Watch watch;
};

inline constexpr size_t kMeetingBytes =
    32;  // what one rank tells another at the start of an operation

constexpr size_t control_bytes(int world_size) {
  return 2 * static_cast<size_t>(world_size) * kMeetingBytes;
}

// What a reduction does with the elements.
struct Reduction {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int divisor = 0;      // AVG: usually the number of ranks
  double factor = 1.0;  // PREMUL_SUM: this rank's own
};

// What travels between ranks: elements as they are, or codes of 8 bits with a float32 scale for each block of elements
// (docs/quantisation.md has the rule). Results that go on to other ranks are quantised too, so that all ranks have the same bits; a
// group of one rank quantises nothing. Sums are formed in float32, in rank order.
struct WireFormat {
  DType dtype = DType::kFloat8E4M3FN;  // of the codes: float8_e4m3fn, float8_e5m2 or int8
  // Elements that share a scale: a power of two from 32 to 512. 0: elements travel as they are. Otherwise they are float32, float16 or
  // bfloat16.
  size_t block_numel = 0;

  bool is_quantised() const { return block_numel != 0; }
};

// A block's codes and its scale.
PYCOLL_HOST_DEVICE constexpr size_t quantised_slot_blocks(size_t slot_units, size_t block_numel) {
  return slot_units * kUnitBytes / (block_numel + sizeof(float));
}

// `lead_bytes` in arguments: where all ranks' data begins equally far behind a multiple of 16 bytes, that distance (of reduce_scatter
// the input's, of all_gather the output's); a multiple of the element's size. Equal on all ranks; 0 is always right. Units of 16
// bytes are counted so that they are aligned there, so all but a head and a tail moves in vectors.

// ---- barrier

struct BarrierArgs {
  Group group;
};

// What a rank wrote before it (in stream order) is seen by every rank's kernels after it. One block.
void launch_barrier(const BarrierArgs& args, LaunchConfig config, void* stream);

// ---- all_reduce_one_shot, by LL packets that carry their own flags (ll.cuh)

inline constexpr size_t kPacketBytes = 16;   // of which 8 are data
inline constexpr size_t kHeaderPackets = 8;  // of which 2 are used; the rest keeps lines together

// Packets that one rank sends to another in one epoch, when data has at most `capacity_units` units.
PYCOLL_HOST_DEVICE constexpr size_t ll_stripe_packets(size_t capacity_units) {
  return kHeaderPackets + 2 * capacity_units;
}

// Two epochs, a stripe for each source.
constexpr size_t ll_mailbox_bytes(int world_size, size_t capacity_units) {
  return 2 * static_cast<size_t>(world_size) * ll_stripe_packets(capacity_units) * kPacketBytes;
}

// Units of 16 bytes in which data travels by packets.
constexpr size_t packet_units(size_t numel, DType dtype, const WireFormat& wire,
                              size_t lead_bytes = 0) {
  if (wire.block_numel == 0) return ceil_div(numel * itemsize(dtype) + lead_bytes, kUnitBytes);
  return ceil_div(numel, wire.block_numel) * (wire.block_numel / kUnitBytes + 1);
}

struct AllReduceOneShotArgs {
  // Its epochs are used by one-shot kernels only, and its control memory not at all: the packets are signals enough.
  Group group;
  const void* input = nullptr;
  void* output = nullptr;  // the same as input, or memory that does not overlap it
  size_t numel = 0;
  size_t lead_bytes = 0;
  Reduction reduction;
  WireFormat wire;
  PeerTable mailboxes;        // ll_mailbox_bytes of each rank, 128-byte aligned, zero at first
  size_t capacity_units = 0;  // a multiple of 8; no fewer than packet_units(...)
};

// output = input of rank 0 op input of rank 1 op ...: in rank order, in the accumulate type, rounded once; the same bits on
// all ranks.
void launch_all_reduce_one_shot(const AllReduceOneShotArgs& args, LaunchConfig config,
                                void* stream);

// ---- direct kernels: each rank writes into slots of each other rank (direct.cuh)

// Two areas of slots and signals: all_reduce_two_shot uses one on the way in and one on the way out, the others use them in turn.
inline constexpr int kDirectAreas = 2;

// Memory of each rank, 128-byte aligned; the signals zero at first. Kernels of all kinds and grids may share it.
struct DirectStaging {
  PeerTable signals;  // direct_signal_bytes(world_size)
  PeerTable slots;    // direct_slot_bytes(...)
  size_t slot_units = 0;
};

constexpr size_t direct_signal_bytes(int world_size) {
  return sizeof(uint64_t) * kDirectAreas * kMaxBlocks * static_cast<size_t>(world_size);
}
constexpr size_t direct_slot_bytes(int world_size, int num_blocks, size_t slot_units) {
  return kUnitBytes * kDirectAreas * static_cast<size_t>(num_blocks) *
         static_cast<size_t>(world_size) * slot_units;
}

struct AllReduceTwoShotArgs {
  Group group;
  const void* input = nullptr;
  void* output = nullptr;  // the same as input, or memory that does not overlap it
  size_t numel = 0;
  size_t lead_bytes = 0;
  Reduction reduction;
  WireFormat wire;
  DirectStaging staging;  // of a quantised wire at least a block and its scale fit a slot
};

// As all_reduce_one_shot, in the same order: each rank adds up one part and sends the result to all.
void launch_all_reduce_two_shot(const AllReduceTwoShotArgs& args, LaunchConfig config,
                                void* stream);

struct ReduceScatterDirectArgs {
  Group group;
  const void* input = nullptr;  // all chunks
  void* output = nullptr;       // this rank's chunk; it may be where that chunk is in the input
  ChunkTable chunks;            // of elements; on a quantised wire blocks begin with each chunk
  size_t lead_bytes = 0;
  Reduction reduction;
  WireFormat wire;
  DirectStaging staging;
};

// output = this rank's chunk, reduced in rank order.
void launch_reduce_scatter_direct(const ReduceScatterDirectArgs& args, LaunchConfig config,
                                  void* stream);

struct AllGatherQuantisedArgs {
  Group group;
  const void* input = nullptr;  // this rank's chunk; it may be where that chunk is in the output
  void* output = nullptr;       // all chunks
  ChunkTable chunks;            // of elements
  DType dtype = DType::kFloat32;
  WireFormat wire;
  DirectStaging staging;
};

// output = what arrives of each chunk, of the own one too.
void launch_all_gather_quantised(const AllGatherQuantisedArgs& args, LaunchConfig config,
                                 void* stream);

// Bytes that this rank sends to each rank, itself too, and gets from each. What one rank sends another must be as much as that
// one expects; this is compared before anything is written.
struct ExchangeDirectArgs {
  Group group;
  const void* send[kMaxRanks] = {};
  size_t send_bytes[kMaxRanks] = {};
  void* receive[kMaxRanks] = {};
  size_t receive_bytes[kMaxRanks] = {};
  DirectStaging staging;
};

// all_to_all, with uneven pieces too. A rank's own piece may already be where it belongs; otherwise nothing may overlap.
void launch_exchange_direct(const ExchangeDirectArgs& args, LaunchConfig config, void* stream);

// Collectives that are exchanges; `args` has group and staging set.
//
// all_gather: chunks in bytes; `input` is this rank's, `output` holds all.
inline void fill_all_gather(ExchangeDirectArgs& args, const void* input, void* output,
                            const ChunkTable& chunks) {
  for (int rank = 0; rank < args.group.world_size; ++rank) {
    args.send[rank] = input;
    args.send_bytes[rank] = chunks.numel[args.group.rank];
    args.receive[rank] = static_cast<std::byte*>(output) + chunks.begin[rank];
    args.receive_bytes[rank] = chunks.numel[rank];
  }
}
// broadcast: root's `input` goes to every rank's `output`.
inline void fill_broadcast(ExchangeDirectArgs& args, const void* input, void* output, size_t nbytes,
                           int root) {
  for (int rank = 0; rank < args.group.world_size; ++rank) {
    args.send[rank] = input;
    args.send_bytes[rank] = args.group.rank == root ? nbytes : 0;
    args.receive[rank] = rank == root ? output : nullptr;
    args.receive_bytes[rank] = rank == root ? nbytes : 0;
  }
}

// ---- ring kernels (ring.cuh)

enum class Protocol : uint8_t {
  kSimple,  // plain data, then a signal: the most bandwidth
  kLL128,  // lines of 128 bytes that carry their own flags: less latency, 120 of 128 bytes are data. NVLink only
};

inline constexpr int kRingSlots = 4;
inline constexpr int kRingSignals =
    2;  // tail, written by the previous rank; head, written by the next

// Memory of a rank that its neighbours write to, 128-byte aligned, zero at first. Kernels of both protocols must not share slots.
struct RingStaging {
  void* slots = nullptr;  // ring_slot_bytes(...)
  void* slots_of_next = nullptr;
  uint64_t* signals = nullptr;  // ring_signal_bytes()
  uint64_t* signals_of_next = nullptr;
  uint64_t* signals_of_previous = nullptr;
  size_t slot_units = 0;  // of user data
};

constexpr size_t ring_signal_bytes() { return sizeof(uint64_t) * kRingSignals * kMaxBlocks; }

// Partial results of floats travel in the accumulate type, and so do those of averages of integers: up to this many times the room of
// the elements.
inline constexpr size_t kMaxWireVectors = 4;
// Two lines carry 15 units.
inline constexpr size_t kUnitsPerLinePair = 15;

PYCOLL_HOST_DEVICE constexpr size_t ring_slot_vectors(Protocol protocol, size_t slot_units) {
  const size_t line_pairs = ceil_div(slot_units, kUnitsPerLinePair);
  return kMaxWireVectors * (protocol == Protocol::kSimple ? slot_units : 16 * line_pairs);
}
constexpr size_t ring_slot_bytes(Protocol protocol, int num_blocks, size_t slot_units) {
  return kUnitBytes * kRingSlots * static_cast<size_t>(num_blocks) *
         ring_slot_vectors(protocol, slot_units);
}

struct AllReduceRingArgs {
  Group group;
  Protocol protocol = Protocol::kSimple;
  const void* input = nullptr;
  void* output = nullptr;  // the same as input, or memory that does not overlap it
  size_t numel = 0;
  size_t lead_bytes = 0;
  Reduction reduction;
  RingStaging staging;
};

// Each chunk is added up along the ring, beginning with the rank after the one where it ends: not in rank order.
void launch_all_reduce_ring(const AllReduceRingArgs& args, LaunchConfig config, void* stream);

struct ReduceScatterRingArgs {
  Group group;
  Protocol protocol = Protocol::kSimple;
  const void* input = nullptr;  // all chunks
  void* output = nullptr;       // this rank's chunk; it may be where that chunk is in the input
  ChunkTable chunks;            // of elements
  size_t lead_bytes = 0;
  Reduction reduction;
  RingStaging staging;
};

// Not in rank order either.
void launch_reduce_scatter_ring(const ReduceScatterRingArgs& args, LaunchConfig config,
                                void* stream);

struct AllGatherRingArgs {
  Group group;
  Protocol protocol = Protocol::kSimple;
  const void* input = nullptr;  // this rank's chunk; it may be where that chunk is in the output
  void* output = nullptr;       // all chunks
  ChunkTable chunks;            // of bytes
  size_t lead_bytes = 0;
  RingStaging staging;
};

void launch_all_gather_ring(const AllGatherRingArgs& args, LaunchConfig config, void* stream);

// ---- multimem: the switch adds and copies (sm_90 and later, NVSwitch). Not run by the simulator.
//
// Order and rounding are the switch's own: the same bits on all ranks, not those of the other kernels. SUM of float32, float16 and
// bfloat16. Of `staging` signals are used; slots may be any memory of each rank. `multicast_data` is all ranks' data at once, at
// a multicast address.

// Whether the current device can run them; without it the launchers refuse.
bool has_multimem();

struct AllReduceMultimemArgs {
  Group group;
  void* multicast_data = nullptr;  // 16-byte aligned; the result takes its place
  size_t numel = 0;                // a multiple of the elements in 16 bytes
  DType dtype = DType::kFloat32;
  DirectStaging staging;
};

void launch_all_reduce_multimem(const AllReduceMultimemArgs& args, LaunchConfig config,
                                void* stream);

struct ReduceScatterMultimemArgs {
  Group group;
  const void* multicast_data = nullptr;  // all chunks, 16-byte aligned
  void* output = nullptr;                // this rank's, 16-byte aligned
  size_t chunk_numel = 0;                // a multiple of the elements in 16 bytes
  DType dtype = DType::kFloat32;
  DirectStaging staging;
};

void launch_reduce_scatter_multimem(const ReduceScatterMultimemArgs& args, LaunchConfig config,
                                    void* stream);

struct AllGatherMultimemArgs {
  Group group;
  const void* input = nullptr;     // this rank's chunk, 16-byte aligned
  void* multicast_data = nullptr;  // all chunks, 16-byte aligned
  size_t chunk_bytes = 0;          // a multiple of 16
  DirectStaging staging;
};

void launch_all_gather_multimem(const AllGatherMultimemArgs& args, LaunchConfig config,
                                void* stream);

}  // namespace pycoll::cuda
