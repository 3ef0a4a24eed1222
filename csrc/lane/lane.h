// A lane: a FIFO of slots from one rank to another. The schedules above do not know what carries it; here it is shared
// memory (shared_lane.h). docs/memory_model.md, "Lanes".
#pragma once

#include <cstddef>

#include "base/task.h"

namespace pycoll {

class SendLane {
 public:
  virtual ~SendLane() = default;
  virtual size_t slot_bytes() const = 0;
  // Ready when a slot is free.
  virtual Wait writable() const = 0;
  // The next free slot; only when writable. Its bytes are the sender's until commit().
  virtual std::byte* slot() = 0;
  // Hands the slot to the receiver.
  virtual void commit() = 0;
};

class ReceiveLane {
 public:
  virtual ~ReceiveLane() = default;
  virtual size_t slot_bytes() const = 0;
  // Ready when a slot is filled.
  virtual Wait readable() const = 0;
  // The next filled slot; only when readable. Its bytes stay until release().
  virtual const std::byte* slot() = 0;
  virtual void release() = 0;
};

}  // namespace pycoll
