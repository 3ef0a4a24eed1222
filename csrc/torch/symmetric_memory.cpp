#include "torch/symmetric_memory.h"

#include <cstring>
#include <map>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "engine/exchange_values.h"
#include "engine/signal_pads.h"
#include "torch/errors.h"
#include "torch/process_group.h"
#include "torch/runtime.h"
#include "torch/shared_memory.h"

namespace pycoll::torch_adapter {
namespace {

namespace symm = c10d::symmetric_memory;

// A block of the heap: the user's buffer, then its signal pad. The tensor and each handle hold it.
struct Allocation {
  std::shared_ptr<void> block;
  std::byte* base;
  size_t nbytes;
  size_t pad_offset, pad_bytes;
  std::optional<std::string> group_name;  // of the group it was made for

  bool contains(const void* data) const {
    const auto* at = static_cast<const std::byte*>(data);
    return at >= base && at < base + std::max<size_t>(nbytes, 1);
  }
};

// What a rank tells the others of its allocation.
struct Location {
  uint64_t base;  // in its segment
  uint64_t offset;
  uint64_t nbytes, pad_offset, pad_bytes;
  uint64_t is_known;  // 0: the address is in no symmetric allocation
};

// Ranks must have made the same thing.
void compare_locations(const std::vector<Location>& all) {
  for (size_t r = 0; r < all.size(); ++r) {
    PYCOLL_CHECK_ARG(all[r].is_known != 0, "rank ", r,
                     " called rendezvous with a tensor that is not in symmetric memory; make it "
                     "with torch.distributed._symmetric_memory.empty(..., device=\"cpu\")");
  }
  for (size_t r = 1; r < all.size(); ++r) {
    const auto check = [&](const char* what, uint64_t of_zero, uint64_t of_rank) {
      PYCOLL_CHECK_ARG(of_zero == of_rank, "ranks called rendezvous with different tensors: ", what,
                       " is ", of_zero, " bytes on rank 0 and ", of_rank, " on rank ", r,
                       "; allocate the same on all ranks");
    };
    check("the allocation", all[0].nbytes, all[r].nbytes);
    check("the tensor's offset in it", all[0].offset, all[r].offset);
    check("the signal pad", all[0].pad_bytes, all[r].pad_bytes);
  }
}

class CpuSymmetricMemory final : public symm::SymmetricMemory {
 public:
  CpuSymmetricMemory(std::shared_ptr<Communicator> communicator, const std::vector<Location>& all,
                     std::shared_ptr<void> block)
      : communicator_(std::move(communicator)),
        block_(std::move(block)),
        mine_(all[static_cast<size_t>(get_rank())]) {
    const auto* group = communicator_->group().get();
    for (int r = 0; r < get_world_size(); ++r) {
      const Location& location = all[static_cast<size_t>(r)];
      std::byte* base =
          r == get_rank() ? pin_runtime()->endpoint->base() : group->member(r).segment->base();
      if (r != get_rank()) {
        const size_t reserved = group->member(r).segment->reserved();
        const size_t nbytes = location.pad_offset + location.pad_bytes;
        if (nbytes > reserved || location.base > reserved - nbytes) {
          fail(ErrorKind::kSystem, "the symmetric memory of rank ", r, " lies outside its segment");
        }
      }
      buffers_.push_back(base + location.base);
      pads_.push_back(base + location.base + location.pad_offset);
      ranks_.push_back(r);
    }
    signals_ = std::make_unique<SignalPads>(communicator_, pads_, mine_.pad_bytes);
  }

  std::vector<void*> get_buffer_ptrs() override { return buffers_; }
  std::vector<void*> get_signal_pad_ptrs() override { return pads_; }
  // On a CPU, where programs run, host arrays are device arrays.
  void** get_buffer_ptrs_dev() override { return buffers_.data(); }
  void** get_signal_pad_ptrs_dev() override { return pads_.data(); }
  size_t get_buffer_size() override { return mine_.nbytes; }
  size_t get_offset() override { return mine_.offset; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  int get_rank() override { return communicator_->rank(); }
  int get_world_size() override { return communicator_->world_size(); }
  c10::Device get_device() override { return c10::Device(c10::kCPU); }
  const std::vector<int>& get_rank_to_global_rank() override { return ranks_; }
  int* get_rank_to_global_rank_dev() override { return ranks_.data(); }
  bool world_within_direct_access() override { return true; }

  void barrier(int channel, size_t timeout_ms) override {
    translated([&] { signals_->barrier(channel, effective(timeout_ms)); });
  }
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override {
    translated([&] { signals_->put(dst_rank, channel, effective(timeout_ms)); });
  }
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override {
    translated([&] { signals_->wait(src_rank, channel, effective(timeout_ms)); });
  }

 private:
  // 0 is torch's default: the group's.
  std::chrono::milliseconds effective(size_t timeout_ms) const {
    return timeout_ms == 0 ? communicator_->timeout() : std::chrono::milliseconds(timeout_ms);
  }

  const std::shared_ptr<Communicator> communicator_;
  const std::shared_ptr<void> block_;
  const Location mine_;
  std::vector<void*> buffers_, pads_;
  std::vector<int> ranks_;
  std::unique_ptr<SignalPads> signals_;
};

class CpuSymmetricMemoryAllocator final : public symm::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int, const std::optional<std::string>& group_name) override {
    return translated([&] {
      Allocation allocation{};
      allocation.nbytes = size;
      allocation.pad_offset = round_up(size, 64);
      allocation.pad_bytes = symm::get_signal_pad_size();
      allocation.group_name = group_name;
      allocation.base = allocate_shared(allocation.pad_offset + allocation.pad_bytes);
      allocation.block = std::shared_ptr<void>(allocation.base, &release_shared);
      std::memset(allocation.base + allocation.pad_offset, 0, allocation.pad_bytes);
      std::lock_guard<std::mutex> lock(mutex_);
      allocations_.emplace(allocation.base, allocation);
      return static_cast<void*>(allocation.base);
    });
  }

  void free(void* data) override {
    // Outside the lock.
    std::vector<Handle> dropped;
    std::shared_ptr<void> block;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const Allocation* allocation = find(data);
      if (allocation == nullptr) return;
      for (auto it = handles_.begin(); it != handles_.end();) {
        if (allocation->contains(it->first.first)) {
          dropped.push_back(std::move(it->second));
          it = handles_.erase(it);
        } else {
          ++it;
        }
      }
      block = allocation->block;
      allocations_.erase(allocation->base);
    }
  }

  size_t get_alloc_size(void* data) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const Allocation* allocation = find(data);
    TORCH_CHECK_VALUE(allocation != nullptr, "pycoll: ", data, " is not symmetric memory");
    return allocation->nbytes;
  }

  // Not asked by torch before 2.12.
  virtual bool has_allocation(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(data) != nullptr;
  }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(
      void* data, const std::optional<std::string>& group_name) override {
    return translated([&] { return rendezvous_now(data, group_name); });
  }

  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::kCPU; }
  std::string name() override { return "PYCOLL"; }

 private:
  struct Handle {
    std::weak_ptr<Communicator> communicator;
    c10::intrusive_ptr<CpuSymmetricMemory> memory;
  };

  const Allocation* find(const void* data) const {
    auto it = allocations_.upper_bound(static_cast<std::byte*>(const_cast<void*>(data)));
    if (it == allocations_.begin()) return nullptr;
    --it;
    return it->second.contains(data) ? &it->second : nullptr;
  }

  Location locate(const void* data, std::shared_ptr<void>* block) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const Allocation* allocation = find(data);
    if (allocation == nullptr) return Location{};
    *block = allocation->block;
    const auto offset = [&](const void* at) {
      return pin_runtime()->endpoint->heap().offset_of(at);
    };
    return Location{offset(allocation->base), offset(data) - offset(allocation->base),
                    allocation->nbytes,       allocation->pad_offset,
                    allocation->pad_bytes,    1};
  }

  std::string group_of(const void* data, const std::optional<std::string>& given) const {
    if (given.has_value()) return *given;
    std::lock_guard<std::mutex> lock(mutex_);
    const Allocation* allocation = find(data);
    PYCOLL_CHECK_ARG(allocation != nullptr && allocation->group_name.has_value(),
                     "rendezvous was called without a group, and the tensor was not made for one; "
                     "pass the group");
    return *allocation->group_name;
  }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous_now(
      const void* data, const std::optional<std::string>& given) {
    const std::string group_name = group_of(data, given);
    const std::shared_ptr<Communicator> communicator = communicator_of(group_name);
    const auto key = std::make_pair(data, group_name);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto it = handles_.find(key);
      // A group of the same name may have taken the place of one that has gone.
      if (it != handles_.end() && it->second.communicator.lock() == communicator) {
        return it->second.memory;
      }
    }
    std::shared_ptr<void> block;
    const std::vector<Location> all = exchange_values(communicator.get(), locate(data, &block));
    compare_locations(all);
    auto memory = c10::make_intrusive<CpuSymmetricMemory>(communicator, all, std::move(block));
    std::lock_guard<std::mutex> lock(mutex_);
    handles_[key] = Handle{communicator, memory};
    return memory;
  }

  mutable std::mutex mutex_;
  std::map<std::byte*, Allocation> allocations_;  // by base
  std::map<std::pair<const void*, std::string>, Handle> handles_;
};

}  // namespace

std::shared_ptr<Communicator> communicator_of(const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  const auto backend = group->getBackend(c10::kCPU);
  const auto* mine = dynamic_cast<ProcessGroupPycoll*>(backend.get());
  PYCOLL_CHECK_ARG(mine != nullptr, "the backend of group ", group_name, " for the CPU is ",
                   backend->getBackendName(),
                   ", but symmetric memory of the CPU needs pycoll's; make the group with "
                   "backend=\"pycoll\"");
  return mine->communicator();
}

void register_symmetric_memory() {
  if (symm::has_allocator(c10::kCPU)) return;
  auto allocator = c10::make_intrusive<CpuSymmetricMemoryAllocator>();
  symm::register_availability(allocator->name(), allocator);
  symm::register_allocator(c10::kCPU, allocator);
}

}  // namespace pycoll::torch_adapter
