// The memory of a group on a device: where ranks meet, what they leave for one another, and what each counts for itself.
//
// One region that peers see, cut in the same way on all ranks:
//
// | part                                    | written by          | kernels                           |
// |-----------------------------------------|---------------------|-----------------------------------|
// | control entries                         | all                 | all but one-shot                  |
// | mailboxes                               | all                 | one-shot                          |
// | signals and slots of direct kernels     | all                 | direct, two-shot, mapped, multimem |
// | signals and slots of rings, by protocol | neighbours          | rings                             |
// | a channel to and one from each rank     | that rank           | send and receive                  |
//
// and a private one: epochs of meeting kernels, of one-shot, of each channel, and the abort word. All of it is zero at first and
// never reset.
#pragma once

#include <memory>

#include "device/device.h"
#include "device/selection.h"
#include "kernels/cuda/launch.h"

namespace pycoll::device {

class Workspace {
 public:
  struct Shape {
    int rank = 0;
    int world_size = 1;
    Sizes sizes;
    int most_blocks = 1;    // of a collective kernel
    bool has_ring = false;  // rings need twice the memory, and are asked for
  };
  static constexpr int kMessageBlocks = 4;  // of a send or receive

  // Bytes that peers see, of every rank.
  static size_t shared_bytes(const Shape& shape);

  // `shared` is zero, on all ranks, before any kernel uses it.
  Workspace(const Shape& shape, std::shared_ptr<Device> device, PeerMemory shared);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  const Shape& shape() const { return shape_; }
  uint32_t* abort_word() const { return private_; }
  const cuda::FailureRecord& record() const { return *record_; }

  // A group for kernels that meet, for one-shot, and for messages between this rank and `peer`: rank 0 of such a group sends, and
  // the rank in a record of its failure is -1 - peer.
  cuda::Group meeting_group(uint64_t fingerprint, uint64_t timeout_ns) const;
  cuda::Group one_shot_group(uint64_t fingerprint, uint64_t timeout_ns) const;
  cuda::Group message_group(int peer, bool sends, uint64_t fingerprint, uint64_t timeout_ns) const;

  cuda::PeerTable mailboxes() const { return table(layout_.mailboxes); }
  size_t capacity_units() const { return capacity_units_; }
  cuda::DirectStaging direct() const;
  cuda::DirectStaging message_staging(int peer, bool sends) const;
  cuda::RingStaging ring(cuda::Protocol protocol) const;

 private:
  // Offsets in the shared region.
  struct Layout {
    explicit Layout(const Shape& shape);
    size_t control, mailboxes, signals, slots;
    size_t ring_signals[2], ring_slots[2];
    size_t channels, channel_bytes;
    size_t nbytes;
  };
  static size_t capacity_units_of(const Shape& shape);
  static size_t channel_slots_offset();
  cuda::PeerTable table(size_t offset) const;
  cuda::Group group(int rank, int world_size, uint64_t fingerprint, uint64_t timeout_ns) const;
  // The channel from rank `src` to rank `dst`, in the memory of `owner`, one of the two.
  std::byte* channel(int owner, int src, int dst) const;
  cuda::PeerTable channel_table(int peer, bool sends, size_t offset) const;
  uint32_t* epochs(size_t index) const;

  const Shape shape_;
  const Layout layout_;
  const size_t capacity_units_;
  const std::shared_ptr<Device> device_;
  const PeerMemory shared_;
  uint32_t* private_ = nullptr;  // the abort word in a line of its own, then epochs
  cuda::FailureRecord* record_ = nullptr;
};

}  // namespace pycoll::device
