// A device that runs each kernel when it is launched, and lets it touch only what its arguments name: tests of pycoll's operators
// become tests of the kernels that csrc/device/buckets launches.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "device/device.h"
#include "kernels/cuda/library.h"
#include "simulation.h"

namespace pycoll::sim {
namespace {

uint64_t num_launches = 0;

void add_buffers(BufferMap& buffers, const cuda::BucketArgs& args) {
  const size_t bucket_bytes = args.bucket_numel * itemsize(args.bucket_dtype);
  buffers.add(args.tensors, args.num_tensors * sizeof(cuda::BucketTensor));
  buffers.add(args.bucket, bucket_bytes);
  const auto begin = reinterpret_cast<uint64_t>(args.bucket);
  for (size_t i = 0; i < args.num_tensors; ++i) {
    const cuda::BucketTensor& tensor = args.tensors[i];
    const bool is_part_of_bucket = tensor.data >= begin && tensor.data < begin + bucket_bytes;
    if (tensor.data != 0 && !is_part_of_bucket)
      buffers.add(reinterpret_cast<void*>(tensor.data), tensor.numel * itemsize(args.tensor_dtype));
  }
}

void add_buffers(BufferMap& buffers, const cuda::QuantiseArgs& args) {
  const size_t num_blocks =
      args.begins != nullptr ? args.num_blocks : ceil_div(args.numel, args.block_numel);
  buffers.add(args.data, args.numel * itemsize(args.data_dtype));
  buffers.add(args.codes, args.numel);
  buffers.add(args.scales, num_blocks * sizeof(float));
  if (args.begins != nullptr) buffers.add(args.begins, (num_blocks + 1) * sizeof(uint64_t));
}

template <auto launch, class Args>
void run_now(const Args& args, cuda::LaunchConfig config, void*) {
  Simulation simulation(1, {.seed = ++num_launches});
  add_buffers(simulation.buffers(), args);
  launch(args, config, simulation.stream(0));
  const Report report = simulation.run();
  if (!report.done()) throw std::runtime_error(report.text);
}

class ImmediateDevice final : public device::Device {
 public:
  ImmediateDevice() {
    launchers_.flatten = run_now<cuda::launch_flatten, cuda::BucketArgs>;
    launchers_.unflatten = run_now<cuda::launch_unflatten, cuda::BucketArgs>;
    launchers_.quantise = run_now<cuda::launch_quantise, cuda::QuantiseArgs>;
    launchers_.dequantise = run_now<cuda::launch_dequantise, cuda::QuantiseArgs>;
  }

  const cuda::Launchers& launchers() const override { return launchers_; }
  int architecture() const override { return 0; }
  int num_multiprocessors() const override { return 1; }
  Token identity() const override { return {}; }
  std::byte* allocate(size_t nbytes) override {
    return static_cast<std::byte*>(std::calloc(nbytes + 1, 1));
  }
  void release(std::byte* data) override { std::free(data); }
  void clear(std::byte* data, size_t nbytes) override { std::memset(data, 0, nbytes); }
  std::byte* allocate_host(size_t nbytes) override { return allocate(nbytes); }
  void release_host(std::byte* data) override { release(data); }
  void set_word(uint32_t* word, uint32_t value) override { *word = value; }
  device::Stream current_stream() override { return {}; }
  device::Stream new_stream() override { return {}; }
  uint64_t capture_id(const device::Stream&) override { return 0; }
  std::shared_ptr<device::Event> record(const device::Stream&) override {
    return std::make_shared<device::Event>();
  }
  void wait(const device::Stream&, const device::Event&) override {}
  bool has_passed(const device::Event&) override { return true; }
  void synchronise(const device::Event&, const std::function<void()>&) override {}
  void run_on(const device::Stream&, const std::function<void()>& fn) override { fn(); }
  void hold(std::shared_ptr<void>, const device::Stream&) override {}
  std::shared_ptr<std::byte> scratch(size_t nbytes, const device::Stream&) override {
    return {static_cast<std::byte*>(std::malloc(nbytes + 1)), std::free};
  }
  void copy(void* dst, const void* src, size_t nbytes, const device::Stream&) override {
    std::memcpy(dst, src, nbytes);
  }
  void keep_in_graph(std::shared_ptr<void>, const device::Stream&) override {}

 private:
  cuda::Launchers launchers_;
};

}  // namespace
}  // namespace pycoll::sim

extern "C" {

// For pycoll._C.set_simulated_device.
void* pycoll_sim_immediate_device() {
  static pycoll::sim::ImmediateDevice device;
  return static_cast<pycoll::device::Device*>(&device);
}
uint64_t pycoll_sim_num_launches() { return pycoll::sim::num_launches; }

}  // extern "C"
