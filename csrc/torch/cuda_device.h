// A CUDA device by torch's device-generic classes, so that the CPU build of torch compiles it, and by the functions of the CUDA
// library, so that nothing here is linked with CUDA.
#pragma once

#include <memory>

#include <c10/core/Device.h>

#include "device/device.h"
#include "kernels/cuda/driver.h"
#include "kernels/cuda/library.h"

namespace pycoll::torch_adapter {

struct CudaLibrary {
  const cuda::Launchers* launchers;
  const cuda::DriverFunctions* driver;
};

std::shared_ptr<device::Device> make_cuda_device(const CudaLibrary& library, c10::Device device);

}  // namespace pycoll::torch_adapter
