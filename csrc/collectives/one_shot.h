// What one-shot algorithms share: whole inputs beside the signals of the handshake.
#pragma once

#include <vector>

#include "collectives/reduction.h"

namespace pycoll {

// Shows this rank's input chunk beside its signal, if it fits there.
inline bool publish_input(const Context& context) {
  const Request& request = context.request;
  const size_t nbytes = request.nbytes();
  if (!context.fits_payload(nbytes)) return false;
  request.input.copy_from_chunk(context.my_payload(nbytes), 0, 0, request.numel,
                                request.itemsize());
  context.count_written(nbytes);
  return true;
}

// Reduces what all ranks have shown so.
inline void reduce_payloads(const Context& context) {
  const size_t nbytes = context.request.nbytes();
  std::vector<const std::byte*> sources(static_cast<size_t>(context.world_size()));
  for (int r = 0; r < context.world_size(); ++r) {
    sources[static_cast<size_t>(r)] = context.payload(r, nbytes);
  }
  reduce_in_rank_order(context, {0, 0, context.request.numel, 0}, sources.data(), nullptr);
  context.count_read((sources.size() - 1) * nbytes);
}

}  // namespace pycoll
