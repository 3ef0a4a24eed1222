#include "kernels/cuda/all_reduce_one_shot.cuh"

namespace pycoll::cuda {

void launch_all_reduce_one_shot(const AllReduceOneShotArgs& args, LaunchConfig config,
                                void* stream) {
  switch (args.dtype) {
    case DType::kFloat64: return launch<AllReduceOneShotKernel<Float64>>(args, config, stream);
    case DType::kFloat32: return launch<AllReduceOneShotKernel<Float32>>(args, config, stream);
    case DType::kFloat16: return launch<AllReduceOneShotKernel<Float16>>(args, config, stream);
    case DType::kBFloat16: return launch<AllReduceOneShotKernel<BFloat16>>(args, config, stream);
    case DType::kFloat8E4M3FN: return launch<AllReduceOneShotKernel<Float8E4M3FN>>(args, config, stream);
    case DType::kFloat8E5M2: return launch<AllReduceOneShotKernel<Float8E5M2>>(args, config, stream);
    case DType::kInt8: return launch<AllReduceOneShotKernel<Int8>>(args, config, stream);
    case DType::kInt16: return launch<AllReduceOneShotKernel<Int16>>(args, config, stream);
    case DType::kInt32: return launch<AllReduceOneShotKernel<Int32>>(args, config, stream);
    case DType::kInt64: return launch<AllReduceOneShotKernel<Int64>>(args, config, stream);
    case DType::kUInt8: return launch<AllReduceOneShotKernel<UInt8>>(args, config, stream);
    case DType::kUInt16: return launch<AllReduceOneShotKernel<UInt16>>(args, config, stream);
    case DType::kUInt32: return launch<AllReduceOneShotKernel<UInt32>>(args, config, stream);
    case DType::kUInt64: return launch<AllReduceOneShotKernel<UInt64>>(args, config, stream);
    case DType::kBool: return launch<AllReduceOneShotKernel<Bool>>(args, config, stream);
    case DType::kComplex64: return launch<AllReduceOneShotKernel<Complex64>>(args, config, stream);
    case DType::kComplex128: return launch<AllReduceOneShotKernel<Complex128>>(args, config, stream);
    default: break;
  }
}

}  // namespace pycoll::cuda
