#include <cstring>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/driver.h"

namespace pycoll::cuda {
namespace {

// Threads that allocate or copy while another one captures would end its capture otherwise.
class RelaxedCapture {
 public:
  RelaxedCapture() { PYCOLL_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A stream of the calling thread's device that waits for no other, for what has to be done at once.
class AsideStream {
 public:
  AsideStream() { PYCOLL_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~AsideStream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }
  void finish() const { PYCOLL_CUDA_CHECK(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

DeviceFacts facts() {
  int device = 0;
  PYCOLL_CUDA_CHECK(cudaGetDevice(&device));
  cudaDeviceProp properties;
  PYCOLL_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  DeviceFacts facts;
  facts.architecture = properties.major * 10 + properties.minor;
  facts.num_multiprocessors = properties.multiProcessorCount;
  static_assert(sizeof(properties.uuid.bytes) == sizeof(facts.identity));
  std::memcpy(facts.identity.data(), properties.uuid.bytes, sizeof(facts.identity));
  return facts;
}

void clear(void* data, size_t nbytes) {
  const RelaxedCapture relaxed;
  const AsideStream stream;
  PYCOLL_CUDA_CHECK(cudaMemsetAsync(data, 0, nbytes, stream.get()));
  stream.finish();
}

void* allocate(size_t nbytes) {
  const RelaxedCapture relaxed;
  void* data = nullptr;
  PYCOLL_CUDA_CHECK(cudaMalloc(&data, nbytes));
  clear(data, nbytes);
  return data;
}

// At the end of a process the runtime may have gone before.
void release(void* data) { cudaFree(data); }

void* allocate_host(size_t nbytes) {
  const RelaxedCapture relaxed;
  void* data = nullptr;
  PYCOLL_CUDA_CHECK(cudaHostAlloc(&data, nbytes, cudaHostAllocMapped | cudaHostAllocPortable));
  std::memset(data, 0, nbytes);
  void* on_device = nullptr;
  PYCOLL_CUDA_CHECK(cudaHostGetDevicePointer(&on_device, data, 0));
  if (on_device != data) {
    cudaFreeHost(data);
    fail(ErrorKind::kSystem, "the GPU sees the host's memory under another address (", on_device,
         " is not ", data, "): pycoll needs unified addressing");
  }
  return data;
}

void release_host(void* data) { cudaFreeHost(data); }

void set_word(uint32_t* word, uint32_t value) {
  const RelaxedCapture relaxed;
  const AsideStream stream;
  PYCOLL_CUDA_CHECK(
      cudaMemcpyAsync(word, &value, sizeof(value), cudaMemcpyHostToDevice, stream.get()));
  stream.finish();
}

uint64_t capture_id(void* stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
#if CUDART_VERSION >= 13000
  PYCOLL_CUDA_CHECK(cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &capture, &id));
#else
  PYCOLL_CUDA_CHECK(cudaStreamGetCaptureInfo_v2(static_cast<cudaStream_t>(stream), &capture, &id));
#endif
  return capture == cudaStreamCaptureStatusActive ? id + 1 : 0;
}

void copy(void* dst, const void* src, size_t nbytes, void* stream) {
  PYCOLL_CUDA_CHECK(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDeviceToDevice,
                                    static_cast<cudaStream_t>(stream)));
}

}  // namespace
}  // namespace pycoll::cuda

extern "C" __attribute__((visibility("default"))) const void* pycoll_cuda_driver() {
  using namespace pycoll::cuda;
  static const DriverFunctions functions{facts,        allocate, release,    clear, allocate_host,
                                         release_host, set_word, capture_id, copy};
  return &functions;
}
