// What the host code of collectives needs of the CUDA runtime beside launches, as functions of the library (library.h): nothing else
// is linked with CUDA. All act on the calling thread's current device and raise kSystem.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace pycoll::cuda {

struct DeviceFacts {
  int architecture = 0;  // 90 of sm_90
  int num_multiprocessors = 0;
  std::array<uint8_t, 16> identity = {};  // the same for all processes that see the GPU
};

struct DriverFunctions {
  DeviceFacts (*facts)();
  // Zeros.
  void* (*allocate)(size_t nbytes);
  void (*release)(void* data);
  void (*clear)(void* data, size_t nbytes);
  // Zeros of the host, under one address for both.
  void* (*allocate_host)(size_t nbytes);
  void (*release_host)(void* data);
  // Without waiting for any stream, also while one is captured.
  void (*set_word)(uint32_t* word, uint32_t value);
  uint64_t (*capture_id)(void* stream);
  // Between memory of the device and of allocate_host().
  void (*copy)(void* dst, const void* src, size_t nbytes, void* stream);
  // Calls drop(object) when the graph that the stream is captured into, and what was instantiated from it, has gone: on any thread,
  // from which nothing of CUDA may be called.
  void (*keep_in_graph)(void* stream, void* object, void (*drop)(void* object));
  // Of a cudaEvent_t, also while another thread captures.
  bool (*has_passed)(void* event);
};

}  // namespace pycoll::cuda
