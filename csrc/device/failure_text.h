// What a kernel has found, in words.
#pragma once

#include <chrono>
#include <string>

#include "kernels/cuda/failure.h"

namespace pycoll::device {

// `self`: this rank. `timeout`: of its operations. `refusal`: why this rank's own call was refused, if it was.
std::string describe_failure(const cuda::FailureRecord& record, int self,
                             std::chrono::milliseconds timeout, const std::string& refusal);

}  // namespace pycoll::device
