// From a request to launches of kernels.
#pragma once

#include "collectives/request.h"
#include "device/device.h"
#include "device/selection.h"
#include "device/workspace.h"

namespace pycoll::device {

// Where and how an operation runs.
struct Place {
  Device* device;
  const Workspace* workspace;
  Stream stream;
  uint64_t fingerprint;
  uint64_t timeout_ns;
};

// Puts the kernels of a collective into the stream: one for each tensor of a coalesced request.
void launch_collective(const Place& place, const Request& request, const Choice& choice);

// A message from this rank to `peer`, or from there.
struct Message {
  int peer;
  bool sends;
  void* data;
  size_t nbytes;
};
void launch_message(const Place& place, const Message& message);

// Kernels that no peer expects, on whatever kernel it waits: so that it finds a mismatch instead of waiting. Of the two streams one
// has the kernel for those that wait in a meeting, the other that for one-shot.
void launch_refusal(const Place& place, const Stream& other_stream);

// Whether CUDA kernels can do it. Raises kInvalidArgument, naming what they can.
void check_supported(const Request& request);

}  // namespace pycoll::device
