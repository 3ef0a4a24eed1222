#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/multimem.cuh"

namespace pycoll::cuda {
namespace {

// CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, which has no name of its own in the runtime.
constexpr auto kMulticastAttribute = static_cast<cudaDeviceAttr>(132);

void check_multimem(LaunchConfig config, size_t nbytes) {
  check_grid(config);
  PYCOLL_CHECK_ARG(has_multimem(),
                   "this GPU has no multimem instructions, or no switch that "
                   "carries them out; choose another algorithm");
  PYCOLL_CHECK(nbytes % kUnitBytes == 0);
}

// Calls `fn` with the element type that the switch adds.
template <class Fn>
void with_element(DType dtype, Fn fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(Float32{});
    case DType::kFloat16:
      return fn(Float16{});
    case DType::kBFloat16:
      return fn(BFloat16{});
    default:
      fail(ErrorKind::kInvalidArgument, "the switch does not add ", name(dtype));
  }
}

}  // namespace

bool has_multimem() {
  int device = 0, major = 0, multicast = 0;
  PYCOLL_CUDA_CHECK(cudaGetDevice(&device));
  PYCOLL_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  PYCOLL_CUDA_CHECK(cudaDeviceGetAttribute(&multicast, kMulticastAttribute, device));
  return major >= 9 && multicast != 0;
}

void launch_all_reduce_multimem(const AllReduceMultimemArgs& args, LaunchConfig config,
                                void* stream) {
  check_multimem(config, args.numel * itemsize(args.dtype));
  with_element(args.dtype, [&]<class Element>(Element) {
    launch<AllReduceMultimemKernel<Element>>(args, config, stream);
  });
}
void launch_reduce_scatter_multimem(const ReduceScatterMultimemArgs& args, LaunchConfig config,
                                    void* stream) {
  check_multimem(config, args.chunk_numel * itemsize(args.dtype));
  with_element(args.dtype, [&]<class Element>(Element) {
    launch<ReduceScatterMultimemKernel<Element>>(args, config, stream);
  });
}
void launch_all_gather_multimem(const AllGatherMultimemArgs& args, LaunchConfig config,
                                void* stream) {
  check_multimem(config, args.chunk_bytes);
  launch<AllGatherMultimemKernel>(args, config, stream);
}

}  // namespace pycoll::cuda
