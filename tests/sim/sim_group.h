// The memory that a group of simulated ranks needs, and arguments that point to it.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "guarded.h"
#include "kernels/cuda/launch.h"
#include "simulation.h"

namespace pycoll::sim {

// Zeros, aligned to a line, known to the simulation, and shared with processes that are forked later.
class DeviceMemory {
 public:
  DeviceMemory(Simulation& simulation, size_t nbytes)
      : data_(static_cast<std::byte*>(mmap(nullptr, nbytes + 1, PROT_READ | PROT_WRITE,
                                           MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)),
              Unmap{nbytes + 1}) {
    simulation.buffers().add(data_.get(), nbytes);
  }
  void* get() const { return data_.get(); }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  struct Unmap {
    size_t nbytes;
    void operator()(std::byte* p) const { munmap(p, nbytes); }
  };
  std::unique_ptr<std::byte, Unmap> data_;
};

struct GroupSizes {
  int world_size = 2;
  int num_blocks = 2;
  int threads_per_block = 64;
  size_t slot_units = 8;
  size_t capacity_units = 128;  // of one-shot
  cuda::Protocol protocol = cuda::Protocol::kSimple;
};

class SimGroup {
 public:
  static constexpr uint64_t kFingerprint = 0x1234'5678'9abc'def0u;

  SimGroup(const GroupSizes& sizes, const Options& options)
      : sizes(sizes), simulation(sizes.world_size, options) {
    const int n = sizes.world_size;
    for (int rank = 0; rank < n; ++rank) {
      add(control_, cuda::control_bytes(n));
      add(epochs_, 2 * sizeof(uint32_t) * cuda::kMaxBlocks);
      add(mailboxes_, cuda::ll_mailbox_bytes(n, sizes.capacity_units));
      add(direct_signals_, cuda::direct_signal_bytes(n));
      add(direct_slots_, cuda::direct_slot_bytes(n, sizes.num_blocks, sizes.slot_units));
      add(ring_signals_, cuda::ring_signal_bytes());
      add(ring_slots_, cuda::ring_slot_bytes(sizes.protocol, sizes.num_blocks, sizes.slot_units));
      add(watches_, sizeof(uint64_t) + sizeof(cuda::FailureRecord));
    }
  }

  cuda::LaunchConfig config() const { return {sizes.num_blocks, sizes.threads_per_block}; }

  cuda::Group group(int rank, bool of_one_shot = false) {
    cuda::Group group;
    group.rank = rank;
    group.world_size = sizes.world_size;
    group.fingerprint = kFingerprint;
    group.control = table(control_);
    group.epochs = epochs(rank, of_one_shot);
    group.watch = {rank, timeout_ns, watches_[at(rank)].as<uint32_t>(), &record(rank)};
    return group;
  }
  uint32_t* epochs(int rank, bool of_one_shot = false) {
    return epochs_[at(rank)].as<uint32_t>() + (of_one_shot ? cuda::kMaxBlocks : 0);
  }
  // As if so many operations had been before.
  void set_epochs(uint32_t epoch) {
    for (int rank = 0; rank < sizes.world_size; ++rank) {
      std::fill_n(epochs(rank), 2 * cuda::kMaxBlocks, epoch);
      auto* const entries = control_[at(rank)].as<uint32_t>();
      for (size_t i = 0; i < cuda::control_bytes(sizes.world_size) / 4; ++i) entries[i] = epoch;
      const uint64_t signal = uint64_t{epoch} << 32;
      std::fill_n(direct_signals_[at(rank)].as<uint64_t>(),
                  cuda::direct_signal_bytes(sizes.world_size) / 8, signal);
      std::fill_n(ring_signals_[at(rank)].as<uint64_t>(), cuda::ring_signal_bytes() / 8, signal);
    }
  }
  cuda::FailureRecord& record(int rank) {
    return *reinterpret_cast<cuda::FailureRecord*>(watches_[at(rank)].as<std::byte>() +
                                                   sizeof(uint64_t));
  }

  cuda::PeerTable mailboxes() { return table(mailboxes_); }
  cuda::DirectStaging direct() {
    return {table(direct_signals_), table(direct_slots_), sizes.slot_units};
  }
  cuda::RingStaging ring(int rank) {
    const int n = sizes.world_size;
    const size_t next = at((rank + 1) % n), previous = at((rank + n - 1) % n);
    cuda::RingStaging staging;
    staging.slots = ring_slots_[at(rank)].get();
    staging.slots_of_next = ring_slots_[next].get();
    staging.signals = ring_signals_[at(rank)].as<uint64_t>();
    staging.signals_of_next = ring_signals_[next].as<uint64_t>();
    staging.signals_of_previous = ring_signals_[previous].as<uint64_t>();
    staging.slot_units = sizes.slot_units;
    return staging;
  }

  const GroupSizes sizes;
  uint64_t timeout_ns = cuda::kNoTimeout;
  Simulation simulation;

 private:
  using Memories = std::vector<DeviceMemory>;

  static size_t at(int rank) { return static_cast<size_t>(rank); }
  void add(Memories& memories, size_t nbytes) { memories.emplace_back(simulation, nbytes); }
  static cuda::PeerTable table(const Memories& memories) {
    cuda::PeerTable table;
    for (size_t rank = 0; rank < memories.size(); ++rank)
      table.of_rank[rank] = memories[rank].get();
    return table;
  }

  Memories control_, epochs_, mailboxes_, direct_signals_, direct_slots_, ring_signals_,
      ring_slots_, watches_;
};

// A user's tensor: bytes between guards. It begins `shift` bytes behind a multiple of 16.
class Tensor {
 public:
  Tensor(SimGroup& group, size_t nbytes, size_t shift) : bytes_(nbytes, shift) {
    group.simulation.buffers().add(bytes_.data(), nbytes);
  }
  uint8_t* data() { return bytes_.data(); }
  size_t nbytes() const { return bytes_.numel(); }
  bool guards_are_intact() const { return bytes_.intact(); }
  std::vector<uint8_t> copy() { return {data(), data() + nbytes()}; }
  void assign(const std::vector<uint8_t>& bytes) {
    std::copy(bytes.begin(), bytes.end(), bytes_.data());
  }

 private:
  test::Guarded<uint8_t> bytes_;
};

}  // namespace pycoll::sim
