// Which tensors lie on a device, and the groups' operations there.
#pragma once

#include <map>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "device/buckets.h"
#include "device/device_group.h"
#include "torch/cuda_device.h"

namespace pycoll::torch_adapter {

// Of all processes that have a use for it: when the operators or the first group are made.
void set_cuda_library(const CudaLibrary& library);

// For tests: CPU tensors of this thread's calls stand for those of this device. Null: they are what they are. The one before.
device::Device* set_simulated_device(device::Device* device);

// Whether operations on tensors of `device` run there: CUDA's, and the CPU's where a device is simulated.
bool runs_on_device(c10::Device device);

// What runs operators on tensors of `device`. Raises kInvalidArgument where this build cannot use it.
device::Buckets& buckets_of(c10::Device device);

// The device groups of one process group, made when they are first needed.
class DevicePath {
 public:
  // Collective the first time. Raises kInvalidArgument where this build cannot use the device.
  std::shared_ptr<device::DeviceGroup> group(c10::Device device,
                                             const std::shared_ptr<Communicator>& communicator,
                                             const std::string& group_name,
                                             const device::GroupOptions& options);
  // Memory of torch's symmetric memory in which `tensor` lies, for operations of the group that copy nothing. Collective.
  void register_symmetric(const at::Tensor& tensor, device::DeviceGroup* group,
                          const std::string& group_name);
  // The one used last, or null.
  std::shared_ptr<device::DeviceGroup> last() const { return last_; }
  c10::Device last_device() const { return last_device_; }
  void abort(const std::string& reason);
  void close(std::chrono::milliseconds patience);

 private:
  std::map<c10::Device, std::shared_ptr<device::DeviceGroup>,
           bool (*)(const c10::Device&, const c10::Device&)>
      groups_{[](const c10::Device& a, const c10::Device& b) {
        return std::make_pair(a.type(), a.index()) < std::make_pair(b.type(), b.index());
      }};
  std::shared_ptr<device::DeviceGroup> last_;
  c10::Device last_device_{c10::kCPU};
};

// Ends the thread that watches devices: before the interpreter goes.
void stop_watching_devices();

}  // namespace pycoll::torch_adapter
