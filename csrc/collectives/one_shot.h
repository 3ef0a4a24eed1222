// What one-shot algorithms share: whole inputs beside the signals of the handshake.
#pragma once

#include <vector>

#include "collectives/reduction.h"
#include "collectives/wire.h"

namespace pycoll {

// Shows this rank's input chunk beside its signal, if it fits there.
inline bool publish_input(const Context& context) {
  const Request& request = context.request;
  const size_t nbytes = request.wire_nbytes(request.numel);
  if (!context.fits_payload(nbytes)) return false;
  write_run(request, 0, {0, request.numel}, context.my_payload(nbytes));
  context.count_written(nbytes);
  return true;
}

// Reduces what all ranks have shown so.
inline void reduce_payloads(const Context& context) {
  const size_t nbytes = context.request.wire_nbytes(context.request.numel);
  std::vector<const std::byte*> sources(static_cast<size_t>(context.world_size()));
  for (int r = 0; r < context.world_size(); ++r) {
    sources[static_cast<size_t>(r)] = context.payload(r, nbytes);
  }
  reduce_in_rank_order(context, {0, 0, context.request.numel, 0}, sources.data(), nullptr);
  context.count_read((sources.size() - 1) * nbytes);
}

}  // namespace pycoll
