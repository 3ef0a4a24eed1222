// An accelerator as the host code of collectives sees it: memory, streams, events, launchers. docs/cuda_path.md.
//
// CUDA's is torch/cuda_device.h; that of the simulator, where tensors in the host's memory stand for those of a device, is
// tests/sim/device.cpp. All that lies above is the same for both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/process.h"
#include "kernels/cuda/library.h"

namespace pycoll::device {

// A queue of work.
struct Stream {
  int64_t id = 0;          // of the framework
  void* handle = nullptr;  // what launchers take

  bool operator==(const Stream&) const = default;
};

// A point in a stream.
class Event {
 public:
  virtual ~Event() = default;
};

// What a rank's memory is seen as by this rank, in rank order.
struct PeerMemory {
  std::vector<std::byte*> of_rank;
  std::byte* multicast = nullptr;  // all ranks' at once, where the hardware can do that
  std::shared_ptr<void> owner;     // keeps it
};

class Device {
 public:
  virtual ~Device() = default;

  virtual const cuda::Launchers& launchers() const = 0;
  // 90 of sm_90; 0: the simulator.
  virtual int architecture() const = 0;
  virtual int num_multiprocessors() const = 0;
  // Equal for two devices only if they are the same piece of hardware.
  virtual Token identity() const = 0;

  // Zeros, aligned to 256 bytes; no stream knows of them. Raise kSystem; not to be called while a stream of this thread is captured.
  virtual std::byte* allocate(size_t nbytes) = 0;
  virtual void release(std::byte* data) = 0;
  // Makes memory zero, now.
  virtual void clear(std::byte* data, size_t nbytes) = 0;
  // Zeros that host and device see under one address; also while a stream is captured.
  virtual std::byte* allocate_host(size_t nbytes) = 0;
  virtual void release_host(std::byte* data) = 0;
  // Writes a word of the device's memory now, whatever its streams are doing.
  virtual void set_word(uint32_t* word, uint32_t value) = 0;

  // Where the calling thread's framework puts its work.
  virtual Stream current_stream() = 0;
  virtual Stream new_stream() = 0;
  // Of the graph that the stream is captured into; 0: none.
  virtual uint64_t capture_id(const Stream& stream) = 0;
  virtual std::shared_ptr<Event> record(const Stream& stream) = 0;
  // What `stream` is given from now on begins after the event.
  virtual void wait(const Stream& stream, const Event& event) = 0;
  virtual bool has_passed(const Event& event) = 0;
  // Until the event has passed; `poll` is called now and then, and throws to give up.
  virtual void synchronise(const Event& event, const std::function<void()>& poll) = 0;
  // Calls `fn` so that the work it gives to the device goes into `stream`.
  virtual void run_on(const Stream& stream, const std::function<void()>& fn) = 0;
  // Keeps what the stream's work uses until it has ended, where the framework's allocator does not order memory by stream itself.
  virtual void hold(std::shared_ptr<void> used, const Stream& stream) = 0;
  // Memory for what is in `stream` until the last reference has gone; contents undefined.
  virtual std::shared_ptr<std::byte> scratch(size_t nbytes, const Stream& stream) = 0;
  // Between memory of the device and of allocate_host.
  virtual void copy(void* dst, const void* src, size_t nbytes, const Stream& stream) = 0;
  // Of a stream that is captured: keeps `used` until the graph, and what was instantiated from it, has gone. The last reference may
  // go on a thread from which the device must not be called.
  virtual void keep_in_graph(std::shared_ptr<void> used, const Stream& stream) = 0;
};

}  // namespace pycoll::device
