#include <cuda_runtime.h>

#include "kernels/cuda/library.h"

#define PYCOLL_EXPORT extern "C" __attribute__((visibility("default")))

PYCOLL_EXPORT const void* pycoll_cuda_launchers() {
  static const pycoll::cuda::Launchers launchers;
  return &launchers;
}

// GPUs that there are. Negative: why they cannot be counted, as -cudaError_t.
PYCOLL_EXPORT int pycoll_cuda_num_devices() {
  int num_devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&num_devices);
  return status == cudaSuccess ? num_devices : -static_cast<int>(status);
}
PYCOLL_EXPORT const char* pycoll_cuda_error_name(int status) {
  return cudaGetErrorName(static_cast<cudaError_t>(status));
}
