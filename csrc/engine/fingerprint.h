// What ranks compare before a collective touches user memory.
#pragma once

#include <string>

#include "collectives/group.h"
#include "collectives/request.h"

namespace pycoll {

// Writes the fingerprint of `request` to this rank's slot of operation `sequence`.
void write_fingerprint(const Group& group, uint64_t sequence, const Request& request);

// Says instead that this rank refused the arguments, and why; `text` is cut to what fits.
void write_refusal(HandshakeLine* line, size_t payload_bytes, const std::string& text);

// After every member's handshake has arrived. Raises kMismatch, with what each rank called, unless all agree; the same on every
// rank. `request` is null on a rank that refused: it raises nothing.
void compare_fingerprints(const Group& group, uint64_t sequence, const Request* request);

}  // namespace pycoll
