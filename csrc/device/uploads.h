// Tables of the host that kernels of a device read.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device/device.h"

namespace pycoll::device {

// Brings them over by copies in the order of a stream, from pinned memory that is used again when they have passed, and never given
// back to the system. The host waits for nothing. Any thread.
class Uploads {
 public:
  explicit Uploads(Device* device) : device_(device) {}

  // A copy in the device's memory, for what is put into `stream` until the last reference has gone. `data` may go at once. While
  // the stream is captured the copy is the graph's, with the pinned memory that it reads.
  std::shared_ptr<std::byte> upload(const void* data, size_t nbytes, const Stream& stream);

 private:
  struct Block {
    std::byte* data = nullptr;
    size_t nbytes = 0;
  };
  // What graphs had. They end on threads that must not wait for the device, so its lock is held for moments only.
  struct Returned {
    std::mutex mutex;
    std::vector<Block> blocks;
  };
  Block take(size_t nbytes, bool may_ask_events);
  Block* find_free(size_t nbytes);
  void collect(bool may_ask_events);

  Device* const device_;
  const std::shared_ptr<Returned> returned_ = std::make_shared<Returned>();
  std::mutex mutex_;  // of what follows
  std::vector<Block> free_;
  std::map<int64_t, std::deque<std::pair<Block, std::shared_ptr<Event>>>> copying_;  // by stream
};

}  // namespace pycoll::device
