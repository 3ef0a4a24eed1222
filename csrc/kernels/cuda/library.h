// The kernels as a library of their own, which the rest of pycoll opens at run time: nothing else is linked with CUDA, and one build
// runs with and without it.
#pragma once

#include "kernels/cuda/bucket.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mapped.h"

namespace pycoll::cuda {

struct Launchers {
  decltype(&launch_barrier) barrier = launch_barrier;
  decltype(&launch_all_reduce_one_shot) all_reduce_one_shot = launch_all_reduce_one_shot;
  decltype(&launch_all_reduce_two_shot) all_reduce_two_shot = launch_all_reduce_two_shot;
  decltype(&launch_all_reduce_ring) all_reduce_ring = launch_all_reduce_ring;
  decltype(&cuda::has_multimem) has_multimem = cuda::has_multimem;
  decltype(&launch_all_reduce_multimem) all_reduce_multimem = launch_all_reduce_multimem;
  decltype(&launch_reduce_scatter_multimem) reduce_scatter_multimem =
      launch_reduce_scatter_multimem;
  decltype(&launch_all_gather_multimem) all_gather_multimem = launch_all_gather_multimem;
  decltype(&launch_reduce_scatter_direct) reduce_scatter_direct = launch_reduce_scatter_direct;
  decltype(&launch_reduce_scatter_ring) reduce_scatter_ring = launch_reduce_scatter_ring;
  decltype(&launch_all_gather_ring) all_gather_ring = launch_all_gather_ring;
  decltype(&launch_all_gather_quantised) all_gather_quantised = launch_all_gather_quantised;
  decltype(&launch_exchange_direct) exchange_direct = launch_exchange_direct;
  decltype(&launch_flatten) flatten = launch_flatten;
  decltype(&launch_unflatten) unflatten = launch_unflatten;
  decltype(&launch_quantise) quantise = launch_quantise;
  decltype(&launch_dequantise) dequantise = launch_dequantise;
  decltype(&launch_reduce_mapped) reduce_mapped = launch_reduce_mapped;
  decltype(&launch_send_mapped) send_mapped = launch_send_mapped;
};

}  // namespace pycoll::cuda
