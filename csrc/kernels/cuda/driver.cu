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
  try {
    clear(data, nbytes);
  } catch (...) {
    cudaFree(data);
    throw;
  }
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

struct Capture {
  cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;

  explicit Capture(void* stream) {
    const auto of = static_cast<cudaStream_t>(stream);
#if CUDART_VERSION >= 13000
    PYCOLL_CUDA_CHECK(cudaStreamGetCaptureInfo(of, &state, &id, &graph));
#else
    PYCOLL_CUDA_CHECK(cudaStreamGetCaptureInfo_v2(of, &state, &id, &graph));
#endif
  }
  bool is_active() const { return state == cudaStreamCaptureStatusActive; }
};

uint64_t capture_id(void* stream) {
  const Capture capture(stream);
  return capture.is_active() ? capture.id + 1 : 0;
}

void copy(void* dst, const void* src, size_t nbytes, void* stream) {
  PYCOLL_CUDA_CHECK(
      cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
}

void keep_in_graph(void* stream, void* object, void (*drop)(void* object)) {
  const Capture capture(stream);
  PYCOLL_CHECK(capture.is_active());
  cudaUserObject_t kept = nullptr;
  PYCOLL_CUDA_CHECK(cudaUserObjectCreate(&kept, object, drop, 1, cudaUserObjectNoDestructorSync));
  const cudaError_t retained =
      cudaGraphRetainUserObject(capture.graph, kept, 1, cudaGraphUserObjectMove);
  if (retained != cudaSuccess) cudaUserObjectRelease(kept);
  PYCOLL_CUDA_CHECK(retained);
}

bool has_passed(void* event) {
  const RelaxedCapture relaxed;
  const cudaError_t found = cudaEventQuery(static_cast<cudaEvent_t>(event));
  if (found == cudaErrorNotReady) {
    cudaGetLastError();  // or a launch would find it
    return false;
  }
  PYCOLL_CUDA_CHECK(found);
  return true;
}

}  // namespace
}  // namespace pycoll::cuda

extern "C" __attribute__((visibility("default"))) const void* pycoll_cuda_driver() {
  using namespace pycoll::cuda;
  static const DriverFunctions functions{facts,         allocate,      release,   clear,
                                         allocate_host, release_host,  set_word,  capture_id,
                                         copy,          keep_in_graph, has_passed};
  return &functions;
}
