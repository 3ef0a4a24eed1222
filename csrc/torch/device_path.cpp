#include "torch/device_path.h"

#include <mutex>

#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "base/error.h"
#include "device/watchdog.h"

namespace pycoll::torch_adapter {
namespace {

struct Registry {
  std::mutex mutex;
  std::optional<CudaLibrary> library;
  std::map<c10::DeviceIndex, std::shared_ptr<device::Device>> devices;
  std::map<const device::Device*, std::unique_ptr<device::Buckets>> buckets;
  device::Watchdog watchdog;
};

// Never destroyed: exit handlers use it.
Registry& registry() {
  static auto* const instance = new Registry();
  return *instance;
}

thread_local device::Device* simulated = nullptr;

// `otherwise`: what may be done without kernels.
std::shared_ptr<device::Device> find_device(c10::Device device, const char* otherwise) {
  // Owned by the test.
  if (device.is_cpu()) return {std::shared_ptr<void>(), simulated};
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  PYCOLL_CHECK_ARG(r.library.has_value(), "the tensor is on ", device.str(),
                   ", and this build of pycoll has no CUDA kernels; build it with PYCOLL_CUDA=1 ",
                   otherwise);
  auto& known = r.devices[device.index()];
  if (known == nullptr) known = make_cuda_device(*r.library, device);
  return known;
}

// The allocation in which `tensor` lies, and how many bytes it has.
device::PeerMemory peer_memory(const at::Tensor& tensor, const std::string& group_name,
                               size_t* nbytes) {
  const auto handle = c10d::symmetric_memory::rendezvous(tensor, group_name);
  *nbytes = handle->get_buffer_size();
  device::PeerMemory memory;
  for (void* pointer : handle->get_buffer_ptrs())
    memory.of_rank.push_back(static_cast<std::byte*>(pointer));
  memory.multicast = static_cast<std::byte*>(handle->get_multicast_ptr());
  memory.owner = std::make_shared<std::pair<at::Tensor, decltype(handle)>>(tensor, handle);
  return memory;
}

// By torch's symmetric memory of the device, which is pycoll's own for the CPU.
device::PeerMemory share_memory(size_t nbytes, c10::Device device, const std::string& group_name) {
  namespace symm = c10d::symmetric_memory;
  const at::Tensor tensor = symm::empty_strided_p2p({static_cast<int64_t>(nbytes)}, {1}, at::kByte,
                                                    device, group_name, std::nullopt);
  return peer_memory(tensor, group_name, &nbytes);
}

}  // namespace

void set_cuda_library(const CudaLibrary& library) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  r.library = library;
}

device::Device* set_simulated_device(device::Device* device) {
  return std::exchange(simulated, device);
}

bool runs_on_device(c10::Device device) {
  return device.is_cuda() || (device.is_cpu() && simulated != nullptr);
}

device::Buckets& buckets_of(c10::Device device) {
  std::shared_ptr<device::Device> found =
      find_device(device, "where nvcc is, or move the tensor with .cpu()");
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  auto& buckets = r.buckets[found.get()];
  if (buckets == nullptr) buckets = std::make_unique<device::Buckets>(std::move(found));
  return *buckets;
}

std::shared_ptr<device::DeviceGroup> DevicePath::group(
    c10::Device device, const std::shared_ptr<Communicator>& communicator,
    const std::string& group_name, const device::GroupOptions& options) {
  last_device_ = device;
  auto& known = groups_[device];
  if (known == nullptr) {
    known = device::DeviceGroup::create(
        find_device(device,
                    "where nvcc is, move the tensor with .cpu(), or use another backend for that "
                    "device, as in init_process_group(\"cpu:pycoll,cuda:nccl\")"),
        communicator, options,
        [&](size_t nbytes) { return share_memory(nbytes, device, group_name); });
    registry().watchdog.add(known);
  }
  return last_ = known;
}

void DevicePath::register_symmetric(const at::Tensor& tensor, device::DeviceGroup* group,
                                    const std::string& group_name) {
  size_t nbytes = 0;
  device::PeerMemory memory = peer_memory(tensor, group_name, &nbytes);
  group->add_window(std::move(memory), nbytes);
}

void DevicePath::abort(const std::string& reason) {
  for (const auto& [device, group] : groups_) {
    if (group != nullptr) group->abort(reason);
  }
}

void DevicePath::close(std::chrono::milliseconds patience) {
  for (const auto& [device, group] : groups_) {
    if (group != nullptr) group->close(patience);
  }
}

void stop_watching_devices() { registry().watchdog.stop(); }

}  // namespace pycoll::torch_adapter
