// Calls of the process group whose tensors lie on a device: the requests are those of the CPU, what runs them is not.
#include <c10/core/DeviceGuard.h>

#include "base/error.h"
#include "torch/device_work.h"
#include "torch/errors.h"
#include "torch/process_group.h"
#include "torch/profiler.h"
#include "torch/requests.h"

namespace pycoll::torch_adapter {

std::shared_ptr<device::DeviceGroup> ProcessGroupPycoll::device_group(c10::Device device) {
  device::GroupOptions options;
  options.algorithm = communicator_->algorithm();
  options.rows = options_->device_tuning;
  options.interrupt = interpreter_.check_signals;
  return device_path_.group(device, communicator_, options_->group_name, options);
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::launched_on_device(
    c10::intrusive_ptr<DeviceWork> work) {
  work->started();
  if (device_coalesced_.has_value()) device_coalesced_->push_back(work);
  return work;
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::launch_on_device(const Call& call, Tensors outputs,
                                                                 const BuildRequests& build) {
  return translated([&] {
    // Kernels go into streams of this device, whichever is the current one.
    const c10::DeviceGuard guard(call.device);
    const auto group = device_group(call.device);
    const bool blocks = call.collective == Collective::kBarrier;
    auto work =
        c10::make_intrusive<DeviceWork>(group, call.device, getRank(), call.type,
                                        profiler_title(call.type), call.inputs, outputs, blocks);
    const std::shared_ptr<TensorSet> tensors = work->tensors();
    std::vector<Request> requests;
    try {
      requests = build(tensors.get());
      for (const Request& request : requests) {
        communicator_->validate(request);
        device::check_supported(request);
      }
    } catch (const std::exception& error) {
      group->refuse(error.what());
      throw;
    }
    if (requests.empty()) return launched_on_device(std::move(work));
    prepare(tensors, requests);
    auto launched = group->run(requests, call.async, effective(call.timeout));
    work->add(std::move(launched));
    return launched_on_device(std::move(work));
  });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::message_on_device(Tensors& tensors, int peer,
                                                                  int tag, c10d::OpType type) {
  return translated([&] {
    const at::Tensor& tensor = only(tensors, "tensors");
    const bool sends = type == c10d::OpType::SEND;
    PYCOLL_CHECK_ARG(type != c10d::OpType::RECVANYSOURCE, "a tensor on ", tensor.device().str(),
                     " is to be received from any source, but a GPU waits for one rank; name src, "
                     "or receive into a CPU tensor");
    const Role role = sends ? Role::kInput : Role::kOutput;
    check_tensor(tensor, "tensor", role);
    const c10::DeviceGuard guard(tensor.device());
    const auto group = device_group(tensor.device());
    auto work =
        c10::make_intrusive<DeviceWork>(group, tensor.device(), getRank(), type,
                                        profiler_title(type), tensors, sends ? Tensors{} : tensors);
    const std::shared_ptr<TensorSet> set = work->tensors();
    const Elements elements = elements_of(tensor);
    device::DeviceGroup::MessageRequest request;
    request.message = {peer, sends, set->add(tensor, role),
                       elements.numel * itemsize(elements.dtype)};
    request.dtype = elements.dtype;
    request.tag = tag;
    if (set->needs_copies()) {
      if (sends) request.before = [set] { set->fill_stand_ins(); };
      if (!sends) request.after = [set] { set->copy_back(); };
    }
    set->bump_versions();
    auto launched = group->run(request, communicator_->timeout());
    work->add(std::move(launched));
    return launched_on_device(std::move(work));
  });
}

ProcessGroupPycoll::WorkPtr ProcessGroupPycoll::end_device_coalescing() {
  auto works = std::exchange(device_coalesced_, std::nullopt);
  if (!works.has_value() || works->empty()) return nullptr;
  auto whole =
      c10::make_intrusive<DeviceWork>(device_path_.last(), device_path_.last_device(), getRank(),
                                      c10d::OpType::COALESCED, nullptr, Tensors{}, Tensors{});
  for (const auto& work : *works) whole->include(*work);
  return whole;
}

// Where nobody says it: where the last operation was, so that a barrier waits for it.
c10::Device ProcessGroupPycoll::device_of_barrier(const c10d::BarrierOptions& opts) const {
  if (opts.device.has_value() && !opts.device->is_cpu()) return *opts.device;
  return device_path_.last() == nullptr ? c10::Device(c10::kCPU) : device_path_.last_device();
}

void ProcessGroupPycoll::register_symmetric(const at::Tensor& tensor) {
  translated([&] {
    PYCOLL_CHECK_ARG(tensor.is_contiguous(), "the tensor is not contiguous (strides ",
                     tensor.strides(), "); register the one it is a view of");
    const auto group = device_group(tensor.device());
    device_path_.register_symmetric(tensor, group.get(), options_->group_name);
  });
}

void ProcessGroupPycoll::eagerConnectSingleDevice(at::Device device) {
  if (runs_on_device(device)) translated([&] { device_group(device); });
}

}  // namespace pycoll::torch_adapter
