// What ranks tell one another before they work together: a small value each.
#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include "engine/communicator.h"

namespace pycoll {

// The values of all ranks, by rank. Collective.
template <class T>
std::vector<T> exchange_values(Communicator* communicator, T mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(static_cast<size_t>(communicator->world_size()));
  Request request;
  request.collective = Collective::kAllGather;
  request.dtype = DType::kUInt8;
  request.numel = sizeof(T);
  request.input.add_chunk(&mine, sizeof(T));
  for (T& each : all) request.output.add_chunk(&each, sizeof(T));
  communicator->run(std::move(request), communicator->timeout());
  return all;
}

}  // namespace pycoll
