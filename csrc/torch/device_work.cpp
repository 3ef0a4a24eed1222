#include "torch/device_work.h"

#include <algorithm>

#include "torch/errors.h"

namespace pycoll::torch_adapter {

DeviceWork::DeviceWork(std::shared_ptr<device::DeviceGroup> group, c10::Device device, int rank,
                       c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                       std::vector<at::Tensor> outputs, bool blocks)
    : Work(rank, type, title, inputs),
      group_(std::move(group)),
      device_(device),
      blocks_(blocks),
      outputs_(std::move(outputs)) {}

void DeviceWork::add(device::DeviceGroup::Launched launched) {
  device::Device& device = group_->device();
  origin_ = device.current_stream();
  if (!launched.is_aside) device.hold(std::exchange(tensors_, nullptr), launched.stream);
  launched_.push_back(std::move(launched));
}

// Dropped without a wait: what a stream of the group still uses is kept.
DeviceWork::~DeviceWork() {
  if (tensors_ == nullptr) return;
  for (const auto& launched : launched_) group_->keep(launched, tensors_);
}

void DeviceWork::include(const DeviceWork& other) {
  launched_.insert(launched_.end(), other.launched_.begin(), other.launched_.end());
  outputs_.insert(outputs_.end(), other.outputs_.begin(), other.outputs_.end());
}

// The host's range ends here: what the device does then is for the device's own tracing.
void DeviceWork::started() {
  if (recordFunctionEndCallback_) recordFunctionEndCallback_();
}

bool DeviceWork::isCompleted() {
  return !group_->failure().empty() ||
         std::all_of(launched_.begin(), launched_.end(),
                     [this](const auto& launched) { return group_->has_ended(launched); });
}

bool DeviceWork::isSuccess() const { return exception() == nullptr; }

std::exception_ptr DeviceWork::exception() const {
  try {
    translated([&] { group_->check_usable(); });
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  const bool is_captured = std::any_of(launched_.begin(), launched_.end(),
                                       [](const auto& launched) { return launched.capture != 0; });
  if (is_captured || (!blocks_ && timeout.count() <= 0)) return true;
  const Deadline patience = timeout.count() <= 0 ? Deadline::never() : Deadline::after(timeout);
  translated([&] {
    for (const auto& launched : launched_) {
      if (group_->synchronise(launched, patience)) continue;
      fail(ErrorKind::kTimeout, "Timed out waiting ", timeout.count(), " ms for operation ",
           launched.sequence, " of a device; it goes on, and may be waited for again");
    }
  });
  return true;
}

void DeviceWork::synchronize() {
  translated([&] {
    group_->check_usable();
    for (const auto& launched : launched_) group_->join(launched);
  });
  if (tensors_ == nullptr) return;
  device::Device& device = group_->device();
  const std::shared_ptr<TensorSet> tensors = std::exchange(tensors_, nullptr);
  // From here on the current stream's order keeps memory; but what was made in another stream is given out again there.
  if (device.current_stream() == origin_) return device.hold(tensors, origin_);
  for (const auto& launched : launched_) group_->keep(launched, tensors);
}

void DeviceWork::abort() { group_->abort("an operation was aborted"); }

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  if (future_ != nullptr) return future_;
  std::vector<c10::Device> devices;
  if (!device_.is_cpu()) devices.push_back(device_);
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     devices);
  // It is complete for those who go on in streams: it takes its events from the current one.
  const auto complete = [future = future_, outputs = outputs_] {
    future->markCompleted(c10::IValue(outputs));
  };
  if (launched_.empty()) {
    complete();
  } else {
    for (const auto& launched : launched_) {
      if (&launched != &launched_.back()) group_->order(launched_.back().stream, launched);
    }
    group_->device().run_on(launched_.back().stream, complete);
  }
  return future_;
}

uint64_t DeviceWork::getSequencenumber() const {
  return launched_.empty() ? 0 : launched_.front().sequence;
}

}  // namespace pycoll::torch_adapter
