// Copies between the root and all others where tensors lie: what broadcast, gather and scatter do when all are reachable.
#pragma once

#include "collectives/peer_tensors.h"

namespace pycoll {

// Places: the tensor of a rank that is not the root, then what the root has for it: one tensor for all (broadcast), or a chunk a rank.
class RootedCopy {
 public:
  static void announce(const Context& context);
  explicit RootedCopy(const Context& context) : tensors_(context, num_places(context)) {}

  bool is_possible() const { return tensors_.are_reachable(); }
  // Of n ranks the root copies 1 / n of each tensor and the other rank the rest, so that all n move equally much.
  Task run(Context context) const;

 private:
  static size_t num_places(const Context& context);
  static size_t place_at_root(const Context& context, int rank);
  void copy(const Context& context, const Group::Touching& touching, int rank, Range range) const;

  const PeerTensors tensors_;
};

}  // namespace pycoll
