#include "device/workspace.h"

#include "topology/ring.h"

namespace pycoll::device {
namespace {

constexpr size_t kAbortWords = cuda::kLineBytes / sizeof(uint32_t);
constexpr size_t kMeetingEpochs = 0, kOneShotEpochs = 1, kMessageEpochs = 2;

constexpr cuda::Protocol kProtocols[] = {cuda::Protocol::kSimple, cuda::Protocol::kLL128};

// Puts parts behind one another, each on a line of its own.
class Cutter {
 public:
  size_t take(size_t nbytes) {
    const size_t begin = end_;
    end_ = round_up(end_ + nbytes, cuda::kLineBytes);
    return begin;
  }
  size_t end() const { return end_; }

 private:
  size_t end_ = 0;
};

}  // namespace

size_t Workspace::capacity_units_of(const Shape& shape) {
  // Quantised blocks bring their scales, and a head may stand before the first whole unit.
  const size_t units = shape.sizes.one_shot_bytes / cuda::kUnitBytes;
  return round_up(units + units / 16 + 2, 8);
}

size_t Workspace::channel_slots_offset() {
  return round_up(cuda::control_bytes(2), cuda::kLineBytes) +
         round_up(cuda::direct_signal_bytes(2), cuda::kLineBytes);
}

Workspace::Layout::Layout(const Shape& shape) {
  const int n = shape.world_size;
  const size_t slot_units = shape.sizes.slot_units;
  Cutter cutter;
  control = cutter.take(cuda::control_bytes(n));
  mailboxes = cutter.take(cuda::ll_mailbox_bytes(n, capacity_units_of(shape)));
  signals = cutter.take(cuda::direct_signal_bytes(n));
  slots = cutter.take(cuda::direct_slot_bytes(n, shape.most_blocks, slot_units));
  for (size_t p = 0; p < 2; ++p) {
    ring_signals[p] = ring_slots[p] = 0;
    if (!shape.has_ring) continue;
    ring_signals[p] = cutter.take(cuda::ring_signal_bytes());
    ring_slots[p] =
        cutter.take(cuda::ring_slot_bytes(kProtocols[p], shape.most_blocks, slot_units));
  }
  channel_bytes =
      round_up(channel_slots_offset() + cuda::direct_slot_bytes(2, kMessageBlocks, slot_units),
               cuda::kLineBytes);
  channels = cutter.take(2 * static_cast<size_t>(n) * channel_bytes);
  nbytes = cutter.end();
}

size_t Workspace::shared_bytes(const Shape& shape) { return Layout(shape).nbytes; }

Workspace::Workspace(const Shape& shape, std::shared_ptr<Device> device, PeerMemory shared)
    : shape_(shape),
      layout_(shape),
      capacity_units_(capacity_units_of(shape)),
      device_(std::move(device)),
      shared_(std::move(shared)) {
  const size_t counters = kMessageEpochs + 2 * static_cast<size_t>(shape.world_size);
  private_ = reinterpret_cast<uint32_t*>(
      device_->allocate(sizeof(uint32_t) * (kAbortWords + counters * cuda::kMaxBlocks)));
  record_ =
      reinterpret_cast<cuda::FailureRecord*>(device_->allocate_host(sizeof(cuda::FailureRecord)));
}

Workspace::~Workspace() {
  device_->release(reinterpret_cast<std::byte*>(private_));
  device_->release_host(reinterpret_cast<std::byte*>(record_));
}

uint32_t* Workspace::epochs(size_t index) const {
  return private_ + kAbortWords + index * cuda::kMaxBlocks;
}

cuda::PeerTable Workspace::table(size_t offset) const {
  cuda::PeerTable table;
  for (size_t rank = 0; rank < shared_.of_rank.size(); ++rank)
    table.of_rank[rank] = shared_.of_rank[rank] + offset;
  return table;
}

cuda::Group Workspace::group(int rank, int world_size, uint64_t fingerprint,
                             uint64_t timeout_ns) const {
  cuda::Group group;
  group.rank = rank;
  group.world_size = world_size;
  group.fingerprint = fingerprint;
  group.watch = {rank, timeout_ns, private_, record_};
  return group;
}

cuda::Group Workspace::meeting_group(uint64_t fingerprint, uint64_t timeout_ns) const {
  cuda::Group group = this->group(shape_.rank, shape_.world_size, fingerprint, timeout_ns);
  group.control = table(layout_.control);
  group.epochs = epochs(kMeetingEpochs);
  return group;
}

cuda::Group Workspace::one_shot_group(uint64_t fingerprint, uint64_t timeout_ns) const {
  cuda::Group group = meeting_group(fingerprint, timeout_ns);
  group.epochs = epochs(kOneShotEpochs);
  return group;
}

std::byte* Workspace::channel(int owner, int src, int dst) const {
  // A rank has a channel from and one to each rank: 2 r and 2 r + 1.
  const int other = owner == src ? dst : src;
  const size_t index = 2 * static_cast<size_t>(other) + (owner == src ? 1 : 0);
  return shared_.of_rank[static_cast<size_t>(owner)] + layout_.channels +
         index * layout_.channel_bytes;
}

cuda::PeerTable Workspace::channel_table(int peer, bool sends, size_t offset) const {
  const int src = sends ? shape_.rank : peer;
  const int dst = sends ? peer : shape_.rank;
  cuda::PeerTable table;
  table.of_rank[0] = channel(src, src, dst) + offset;
  table.of_rank[1] = channel(dst, src, dst) + offset;
  return table;
}

cuda::Group Workspace::message_group(int peer, bool sends, uint64_t fingerprint,
                                     uint64_t timeout_ns) const {
  cuda::Group group = this->group(sends ? 0 : 1, 2, fingerprint, timeout_ns);
  group.watch.rank = -1 - peer;  // in a record `peer` is one of the channel's two
  group.control = channel_table(peer, sends, 0);
  group.epochs = epochs(kMessageEpochs + 2 * static_cast<size_t>(peer) + (sends ? 1 : 0));
  return group;
}

cuda::DirectStaging Workspace::direct() const {
  return {table(layout_.signals), table(layout_.slots), shape_.sizes.slot_units};
}

cuda::DirectStaging Workspace::message_staging(int peer, bool sends) const {
  const size_t signals = round_up(cuda::control_bytes(2), cuda::kLineBytes);
  return {channel_table(peer, sends, signals), channel_table(peer, sends, channel_slots_offset()),
          shape_.sizes.slot_units};
}

cuda::RingStaging Workspace::ring(cuda::Protocol protocol) const {
  const size_t p = protocol == cuda::Protocol::kSimple ? 0 : 1;
  const int self = shape_.rank, n = shape_.world_size;
  const auto at = [&](int rank, size_t offset) {
    return shared_.of_rank[static_cast<size_t>(rank)] + offset;
  };
  const auto signals = [&](int rank) {
    return reinterpret_cast<uint64_t*>(at(rank, layout_.ring_signals[p]));
  };
  cuda::RingStaging staging;
  staging.slots = at(self, layout_.ring_slots[p]);
  staging.slots_of_next = at(ring::next(self, n), layout_.ring_slots[p]);
  staging.signals = signals(self);
  staging.signals_of_next = signals(ring::next(self, n));
  staging.signals_of_previous = signals(ring::previous(self, n));
  staging.slot_units = shape_.sizes.slot_units;
  return staging;
}

}  // namespace pycoll::device
