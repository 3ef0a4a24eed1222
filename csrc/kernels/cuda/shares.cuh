// Kernels whose ranks read and write one another's tensors where they lie: every unit is one thread's of one rank, and all is over when
// every block has said so.
//
// Ranks meet before, so that what they put into the tensors is there; each block tells the blocks of its number afterwards that its
// share is done, and a kernel ends when its blocks have heard from all: by then nobody reads or writes this rank's tensors, and what
// the others wrote into them is there (release, acquire). Of all ranks' blocks of a number each takes its own share, so together they
// have heard of everything.
#pragma once

#include "kernels/cuda/direct.cuh"

namespace pycoll::cuda {

// Meets, gives this rank's share of `num_units` to `fn(unit)`, and waits until all ranks are done. `factors` as of Meeting::begin.
template <class Args, class Fn>
PYCOLL_DEVICE void run_on_shares(const Args& args, const MeetingTerms& terms, double* factors,
                                 size_t num_units, Phase phase, Fn fn) {
  constexpr int kDone = 0;
  const BlockGroup block;
  const Meeting meeting(args.group, block);
  if (!meeting.begin(terms, factors)) return;
  const Share share = share_of_grid(block);
  for (size_t unit = share.first; unit < num_units; unit += share.stride) fn(unit);
  const DirectLanes lanes(args.group, args.staging, block, meeting.epoch());
  lanes.post(kDone, 1, Everybody{});
  if (!lanes.wait(kDone, 1, phase, Everybody{})) return;
  meeting.end();
}

}  // namespace pycoll::cuda
