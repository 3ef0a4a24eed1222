// The launchers for two element types only (and a third in one ring) and one quantised wire, so that a program with the kernels of another source tree is built in seconds.
#include "kernels/cuda/all_gather_quantised.cuh"
#include "kernels/cuda/all_gather_ring.cuh"
#include "kernels/cuda/all_reduce_one_shot.cuh"
#include "kernels/cuda/all_reduce_ring.cuh"
#include "kernels/cuda/all_reduce_two_shot.cuh"
#include "kernels/cuda/barrier.cuh"
#include "kernels/cuda/exchange_direct.cuh"
#include "kernels/cuda/quantised_wire.cuh"
#include "kernels/cuda/reduce_scatter_direct.cuh"
#include "kernels/cuda/reduce_scatter_ring.cuh"

namespace pycoll::cuda {
namespace {

// `Kernel` of a wire.
template <template <class> class Kernel, class Args>
void launch_few_wires(const Args& args, LaunchConfig config, void* stream) {
  PYCOLL_CHECK(args.reduction.dtype == DType::kFloat32 || args.reduction.dtype == DType::kBFloat16);
  if (args.wire.is_quantised()) {
    PYCOLL_CHECK(args.reduction.dtype == DType::kFloat32 && args.wire.dtype == DType::kInt8);
    launch<Kernel<QuantisedWire<Float32, Int8Code>>>(args, config, stream);
  } else if (args.reduction.dtype == DType::kFloat32) {
    launch<Kernel<PlainWire<Float32>>>(args, config, stream);
  } else {
    launch<Kernel<PlainWire<BFloat16>>>(args, config, stream);
  }
}

// `Kernel` of an element type.
template <template <class> class Kernel, class Args>
void launch_few(const Args& args, LaunchConfig config, void* stream) {
  PYCOLL_CHECK(args.reduction.dtype == DType::kFloat32 || args.reduction.dtype == DType::kBFloat16);
  if (args.reduction.dtype == DType::kFloat32) {
    launch<Kernel<Float32>>(args, config, stream);
  } else {
    launch<Kernel<BFloat16>>(args, config, stream);
  }
}

}  // namespace

void launch_barrier(const BarrierArgs& args, LaunchConfig config, void* stream) {
  launch<BarrierKernel>(args, config, stream);
}
void launch_all_reduce_one_shot(const AllReduceOneShotArgs& args, LaunchConfig config,
                                void* stream) {
  launch_few_wires<AllReduceOneShotKernel>(args, config, stream);
}
void launch_all_reduce_two_shot(const AllReduceTwoShotArgs& args, LaunchConfig config,
                                void* stream) {
  launch_few_wires<AllReduceTwoShotKernel>(args, config, stream);
}
void launch_reduce_scatter_direct(const ReduceScatterDirectArgs& args, LaunchConfig config,
                                  void* stream) {
  launch_few_wires<ReduceScatterDirectKernel>(args, config, stream);
}
void launch_all_reduce_ring(const AllReduceRingArgs& args, LaunchConfig config, void* stream) {
  if (args.reduction.dtype == DType::kInt8) {
    launch<AllReduceRingSimpleKernel<Int8>>(args, config, stream);
  } else if (args.protocol == Protocol::kSimple) {
    launch_few<AllReduceRingSimpleKernel>(args, config, stream);
  } else {
    launch_few<AllReduceRingLL128Kernel>(args, config, stream);
  }
}
void launch_reduce_scatter_ring(const ReduceScatterRingArgs& args, LaunchConfig config,
                                void* stream) {
  if (args.protocol == Protocol::kSimple) {
    launch_few<ReduceScatterRingSimpleKernel>(args, config, stream);
  } else {
    launch_few<ReduceScatterRingLL128Kernel>(args, config, stream);
  }
}
void launch_all_gather_ring(const AllGatherRingArgs& args, LaunchConfig config, void* stream) {
  if (args.protocol == Protocol::kSimple) {
    launch<AllGatherRingSimpleKernel<uint16_t>>(args, config, stream);
  } else {
    launch<AllGatherRingLL128Kernel<uint16_t>>(args, config, stream);
  }
}
void launch_all_gather_quantised(const AllGatherQuantisedArgs& args, LaunchConfig config,
                                 void* stream) {
  launch<AllGatherQuantisedKernel<QuantisedWire<Float32, Int8Code>>>(args, config, stream);
}
void launch_exchange_direct(const ExchangeDirectArgs& args, LaunchConfig config, void* stream) {
  launch<ExchangeDirectKernel<uint16_t>>(args, config, stream);
}

}  // namespace pycoll::cuda
