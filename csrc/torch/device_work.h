// What a collective call on a device returns: torch's Work over what was put into streams. docs/cuda_path.md, "Works".
#pragma once

#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device/device_group.h"
#include "torch/tensors.h"

namespace pycoll::torch_adapter {

class DeviceWork final : public c10d::Work {
 public:
  // `blocks`: wait() holds the host until the device is done, as of a barrier.
  DeviceWork(std::shared_ptr<device::DeviceGroup> group, c10::Device device, int rank,
             c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
             std::vector<at::Tensor> outputs, bool blocks = false);
  ~DeviceWork() override;

  // Before the operations are put into streams: their hooks share it.
  const std::shared_ptr<TensorSet>& tensors() { return tensors_; }
  void add(device::DeviceGroup::Launched launched);
  // The operations of another work.
  void include(const DeviceWork& other);
  // After the last add().
  void started();

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  // Without a timeout: what the current stream is given from now on begins after the operations; the host goes on. With one: the
  // host waits.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

 private:
  const std::shared_ptr<device::DeviceGroup> group_;
  const c10::Device device_;
  const bool blocks_;
  // Shared with the hooks that are in streams. Gone once the current stream is behind the operations.
  std::shared_ptr<TensorSet> tensors_ = std::make_shared<TensorSet>();
  std::vector<at::Tensor> outputs_;
  std::vector<device::DeviceGroup::Launched> launched_;
  device::Stream origin_;  // which was the current one
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace pycoll::torch_adapter
