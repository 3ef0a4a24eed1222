// Reduction of several arrays into one, on the CPU.
#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace pycoll::cpu {

struct Operand {
  const void* data = nullptr;
  // In the accumulate type (a partial result) rather than in the storage type.
  bool accumulated = false;
  double factor = 1.0;  // PREMUL_SUM: multiplies this operand, unless it is accumulated already
};

struct ReduceArgs {
  void* dst = nullptr;
  bool dst_accumulated = false;  // leave the result in the accumulate type
  // More arrays that get the result, apart from dst and from each other; each may be an operand.
  void* const* copies = nullptr;
  int num_copies = 0;
  const Operand* operands = nullptr;
  int num_operands = 0;
  size_t numel = 0;
  DType dtype = DType::kFloat32;  // storage type
  ReduceOp op = ReduceOp::kSum;
  int divisor = 0;  // AVG: divides the result; 0 leaves it a sum
};

// dst = ((operand 0 op operand 1) op operand 2) ... : always in this order, each combination in the accumulate type, rounded
// once at the end. dst may be the same array as any operand of the same type.
void reduce(const ReduceArgs& args);

}  // namespace pycoll::cpu
