#include "torch/cuda_device.h"

#include <thread>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace pycoll::torch_adapter {
namespace {

using device::Stream;

class CudaEvent final : public device::Event {
 public:
  explicit CudaEvent(const c10::Stream& stream) : event_(stream.device_type()) {
    event_.record(stream);
  }
  const c10::Event& get() const { return event_; }

 private:
  c10::Event event_;
};

class CudaDevice final : public device::Device {
  template <class Fn>
  auto here(const Fn& fn) const {
    const c10::DeviceGuard guard(device_);
    return fn();
  }

 public:
  CudaDevice(const CudaLibrary& library, c10::Device device)
      : library_(library), device_(device), guard_(device.type()) {
    facts_ = here([&] { return library_.driver->facts(); });
  }

  const cuda::Launchers& launchers() const override { return *library_.launchers; }
  int architecture() const override { return facts_.architecture; }
  int num_multiprocessors() const override { return facts_.num_multiprocessors; }
  Token identity() const override { return facts_.identity; }

  std::byte* allocate(size_t nbytes) override {
    return here([&] { return static_cast<std::byte*>(library_.driver->allocate(nbytes)); });
  }
  void release(std::byte* data) override {
    here([&] { library_.driver->release(data); });
  }
  void clear(std::byte* data, size_t nbytes) override {
    here([&] { library_.driver->clear(data, nbytes); });
  }
  std::byte* allocate_host(size_t nbytes) override {
    return here([&] { return static_cast<std::byte*>(library_.driver->allocate_host(nbytes)); });
  }
  void release_host(std::byte* data) override {
    here([&] { library_.driver->release_host(data); });
  }
  void set_word(uint32_t* word, uint32_t value) override {
    here([&] { library_.driver->set_word(word, value); });
  }

  Stream current_stream() override { return described(guard_.getStream(device_)); }
  Stream new_stream() override { return described(guard_.getNewStream(device_, kHighPriority)); }
  uint64_t capture_id(const Stream& stream) override {
    return here([&] { return library_.driver->capture_id(stream.handle); });
  }
  std::shared_ptr<device::Event> record(const Stream& stream) override {
    return std::make_shared<CudaEvent>(torch_stream(stream));
  }
  void wait(const Stream& stream, const device::Event& event) override {
    of(event).block(torch_stream(stream));
  }
  bool has_passed(const device::Event& event) override {
    return here([&] { return library_.driver->has_passed(of(event).eventId()); });
  }
  void synchronise(const device::Event& event, const std::function<void()>& poll) override {
    // Not by the runtime's own wait: it would neither see a failure nor Ctrl-C. Nor by the event's query(), which ends what another
    // thread captures.
    for (int polls = 0; !has_passed(event); ++polls) {
      poll();
      if (polls < kPollsBeforeSleep) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }
  void run_on(const Stream& stream, const std::function<void()>& fn) override {
    const c10::StreamGuard guard(torch_stream(stream));
    fn();
  }
  void hold(std::shared_ptr<void>, const Stream&) override {}  // torch's allocator does
  std::shared_ptr<std::byte> scratch(size_t nbytes, const Stream& stream) override {
    // Of torch's allocator: memory that is given back is given out again in the same stream, behind what uses it now.
    const c10::StreamGuard guard(torch_stream(stream));
    auto tensor = std::make_shared<at::Tensor>(
        at::empty({static_cast<int64_t>(nbytes)}, at::TensorOptions(at::kByte).device(device_)));
    return {tensor, static_cast<std::byte*>(tensor->mutable_data_ptr())};
  }
  void copy(void* dst, const void* src, size_t nbytes, const Stream& stream) override {
    here([&] { library_.driver->copy(dst, src, nbytes, stream.handle); });
  }
  void keep_in_graph(std::shared_ptr<void> used, const Stream& stream) override {
    auto kept = std::make_unique<std::shared_ptr<void>>(std::move(used));
    const auto drop = [](void* object) { delete static_cast<std::shared_ptr<void>*>(object); };
    here([&] { library_.driver->keep_in_graph(stream.handle, kept.get(), drop); });
    kept.release();
  }

 private:
  static constexpr int kHighPriority = -1;
  static constexpr int kPollsBeforeSleep = 200;

  static Stream described(const c10::Stream& stream) {
    return {stream.id(), stream.native_handle()};
  }
  c10::Stream torch_stream(const Stream& stream) const {
    return c10::Stream(c10::Stream::UNSAFE, device_, stream.id);
  }
  static const c10::Event& of(const device::Event& event) {
    return static_cast<const CudaEvent&>(event).get();
  }
  const CudaLibrary library_;
  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  cuda::DeviceFacts facts_;
};

}  // namespace

std::shared_ptr<device::Device> make_cuda_device(const CudaLibrary& library, c10::Device device) {
  return std::make_shared<CudaDevice>(library, device);
}

}  // namespace pycoll::torch_adapter
