// Kernels on tensors that all ranks see: nothing is copied between. Plain C++; torch-free.
#pragma once

#include "kernels/cuda/launch.h"

namespace pycoll::cuda {

// Elements [begin, begin + numel) of all ranks' inputs, added up in rank order and rounded once, go to where each rank's output is not
// null. Ranges of different ranks do not overlap, so an output may be the input: of all_reduce each rank takes a range and writes to all;
// of reduce_scatter it writes to its own output only. Nobody returns before all have read and written.
struct ReduceMappedArgs {
  static constexpr size_t lead_bytes = 0;  // units are counted from element `begin`
  Group group;
  PeerTable input;   // the whole tensor of each rank
  PeerTable output;  // where element `begin` goes
  size_t begin = 0;  // this rank's own
  size_t numel = 0;
  Reduction reduction;
  DirectStaging staging;  // of which signals are used; slots may be any memory of each rank
};
void launch_reduce_mapped(const ReduceMappedArgs& args, LaunchConfig config, void* stream);

// Bytes of this rank go to where each rank's output is not null: of all_gather its chunk to all, of broadcast the root's tensor. What
// is there already is not to be written. Nobody returns before all is there.
struct SendMappedArgs {
  Group group;
  const void* input = nullptr;
  PeerTable output;
  size_t nbytes = 0;  // this rank's own
  DirectStaging staging;
};
void launch_send_mapped(const SendMappedArgs& args, LaunchConfig config, void* stream);

}  // namespace pycoll::cuda
