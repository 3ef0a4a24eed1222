// The bucket functions of kernels/cpu/bucket.h on a device: from what they are given to launches. docs/cuda_path.md, "Operators".
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "device/device.h"
#include "device/uploads.h"
#include "kernels/cpu/bucket.h"

namespace pycoll::device {

// Tensors, bucket, codes and scales lie in the device's memory, tables (`entries`) in the host's, and may go when a call returns.
// Whole buckets only: `range` is not looked at. The same bits as the CPU's. Any thread; what is raised while a kernel is put into the
// stream is kSystem.
class Buckets {
 public:
  explicit Buckets(std::shared_ptr<Device> device)
      : device_(std::move(device)), uploads_(device_.get()) {}

  void flatten(const cpu::BucketArgs& args, const Stream& stream);
  void unflatten(const cpu::BucketArgs& args, const Stream& stream);
  void flatten_quantised(const cpu::QuantisedBucketArgs& args, const Stream& stream);
  void unflatten_quantised(const cpu::QuantisedBucketArgs& args, const Stream& stream);

  Device& device() { return *device_; }

 private:
  void move(cuda::Direction direction, const cpu::BucketArgs& args, const Stream& stream);
  void code(bool quantises, const cpu::QuantisedBucketArgs& args, void* data, DType data_dtype,
            const Stream& stream);
  cuda::LaunchConfig config(size_t work_of_warps) const;

  const std::shared_ptr<Device> device_;
  Uploads uploads_;
};

}  // namespace pycoll::device
