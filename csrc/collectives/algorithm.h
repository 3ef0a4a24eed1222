// What an algorithm is, and what it is given.
#pragma once

#include <bit>

#include "base/events.h"
#include "base/task.h"
#include "collectives/group.h"
#include "collectives/request.h"

namespace pycoll {

// One operation in progress on this rank.
struct Context {
  Group& group;
  const Request& request;
  const uint64_t sequence;
  Event& event;

  int rank() const { return group.rank(); }
  int world_size() const { return group.world_size(); }
  SignalReached reached(Wait wait) const { return SignalReached{wait}; }

  // Payload beside the handshake's signal, of `nbytes` (at most Facts::payload_bytes).
  bool fits_payload(size_t nbytes) const { return nbytes <= group.facts().payload_bytes; }
  std::byte* my_payload(size_t nbytes) const {
    return GroupPage::payload(group.handshake_line(rank(), sequence), nbytes);
  }
  const std::byte* payload(int peer, size_t nbytes) const {
    return GroupPage::payload(group.handshake_line(peer, sequence), nbytes);
  }

  // What PREMUL_SUM multiplies the elements of `peer` with; after the handshake.
  double factor(int peer) const {
    return std::bit_cast<double>(group.handshake_line(peer, sequence)->detail);
  }

  // For the event: bytes written for peers, and read from them.
  void count_written(size_t nbytes) const { event.bytes_written += nbytes; }
  void count_read(size_t nbytes) const { event.bytes_read += nbytes; }
};

struct Algorithm {
  const char* name;  // "two_shot"
  Collective collective;
  // Before this rank posts its handshake: may write the payload. Reads user memory, never writes it. True if the peers then
  // need nothing more from this rank.
  bool (*publish)(const Context& context);
  // After all ranks were seen to agree.
  Task (*run)(Context context);
  bool takes_wire_format = false;  // knows Request::wire
};

// docs/algorithms.md says of each what it costs and whether it keeps the fixed bracketing.
extern const Algorithm kAllReduceOneShot;
extern const Algorithm kAllReduceTwoShot;
extern const Algorithm kAllReduceRing;
extern const Algorithm kAllGatherDirect;
extern const Algorithm kAllGatherRing;
extern const Algorithm kReduceScatterDirect;
extern const Algorithm kReduceScatterRing;
extern const Algorithm kBroadcastDirect;
extern const Algorithm kReduceOneShot;
extern const Algorithm kReduceTwoShot;
extern const Algorithm kGatherDirect;
extern const Algorithm kScatterDirect;
extern const Algorithm kAllToAllDirect;
extern const Algorithm kBarrierDirect;

}  // namespace pycoll
