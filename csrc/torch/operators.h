// What does the work of the operators (operators.cpp).
#pragma once

#include "kernels/cpu/bucket.h"

namespace pycoll::torch_adapter {

// From now on the operators that this thread calls run `functions`, which must outlive it; null: the CPU's kernels. Returns what they
// ran before. Tests put simulated CUDA kernels here, behind the same checks of arguments and tensors.
const cpu::BucketFunctions* replace_bucket_functions(const cpu::BucketFunctions* functions);

}  // namespace pycoll::torch_adapter
