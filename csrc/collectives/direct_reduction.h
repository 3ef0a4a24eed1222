// Reducing tensors of all ranks where they lie: what all_reduce and reduce do when all are reachable.
#pragma once

#include "collectives/peer_tensors.h"

namespace pycoll {

class DirectReduction {
 public:
  // The input, and the output, of those that have one.
  static constexpr size_t kPlaces = 2;

  static void announce(const Context& context);
  explicit DirectReduction(const Context& context) : tensors_(context, kPlaces) {}

  bool is_possible() const { return tensors_.are_reachable(); }
  // Each rank reduces one part of the tensor, in rank order, and writes it to every output.
  Task run(Context context) const;

 private:
  struct Buffers;
  void reduce_block(const Context& context, const Group::Touching& touching, Range range,
                    Buffers* buffers) const;
  const PeerTensors tensors_;
};

}  // namespace pycoll
