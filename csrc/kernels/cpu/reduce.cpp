#include "kernels/cpu/reduce.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "kernels/cpu/tile_kernels.h"

namespace pycoll::cpu {
namespace {

constexpr size_t kTileBytes = kTileNumel * 16;  // the widest accumulate type has 16 bytes

// What is the same for all tiles of one reduction.
struct Plan {
  size_t storage_size, accumulate_size;
  WidenFn widen;
  NarrowFn narrow;
  CombineFn combine;
  ScaleFn scale;
  DivideFn divide;
};

Plan make_plan(const ReduceArgs& args) {
  const TileKernels& table = tile_kernels();
  const DType accumulate = accumulate_dtype(args.dtype, args.op);
  const int storage = static_cast<int>(args.dtype);
  const int wide = static_cast<int>(accumulate);
  const bool convert = accumulate != args.dtype || args.dtype == DType::kBool;
  Plan plan{itemsize(args.dtype),
            itemsize(accumulate),
            convert ? table.widen[storage] : nullptr,
            convert ? table.narrow[storage] : nullptr,
            table.combine[wide][static_cast<int>(args.op)],
            args.op == ReduceOp::kPremulSum ? table.scale[wide] : nullptr,
            args.divisor != 0 ? table.divide[wide] : nullptr};
  PYCOLL_CHECK(plan.combine != nullptr);
  return plan;
}

// The tile of an operand in the accumulate type: the operand's own memory where it already is, else in `buffer`.
const std::byte* load(const Plan& plan, const Operand& operand, size_t begin, size_t numel,
                      std::byte* buffer) {
  const auto* data = static_cast<const std::byte*>(operand.data);
  if (operand.accumulated) return data + begin * plan.accumulate_size;
  data += begin * plan.storage_size;
  if (plan.widen != nullptr) {
    plan.widen(buffer, data, numel);
  } else if (plan.scale != nullptr) {
    std::memcpy(buffer, data, numel * plan.accumulate_size);
  } else {
    return data;
  }
  if (plan.scale != nullptr) plan.scale(buffer, operand.factor, numel);
  return buffer;
}

void reduce_tile(const Plan& plan, const ReduceArgs& args, size_t begin, size_t numel,
                 std::byte* sum, std::byte* next) {
  const bool narrow = !args.dst_accumulated && plan.narrow != nullptr;
  const size_t result_size = args.dst_accumulated ? plan.accumulate_size : plan.storage_size;
  auto* dst = static_cast<std::byte*>(args.dst) + begin * result_size;
  const std::byte* result = load(plan, args.operands[0], begin, numel, sum);
  for (int i = 1; i < args.num_operands; ++i) {
    const std::byte* operand = load(plan, args.operands[i], begin, numel, next);
    // dst may be an operand that is read later, so it is written by the last combination only.
    const bool last = i + 1 == args.num_operands && !narrow && plan.divide == nullptr;
    std::byte* target = last ? dst : sum;
    plan.combine(target, result, operand, numel);
    result = target;
  }
  if (plan.divide != nullptr) {
    if (result != sum) std::memcpy(sum, result, numel * plan.accumulate_size);
    plan.divide(sum, args.divisor, numel);
    result = sum;
  }
  if (narrow) {
    plan.narrow(dst, result, numel);
  } else if (result != dst) {
    std::memmove(dst, result, numel * plan.accumulate_size);
  }
  // All operands of this tile have been read.
  for (int i = 0; i < args.num_copies; ++i) {
    std::memcpy(static_cast<std::byte*>(args.copies[i]) + begin * result_size, dst,
                numel * result_size);
  }
}

}  // namespace

void reduce(const ReduceArgs& args) {
  const Plan plan = make_plan(args);
  alignas(64) std::byte sum[kTileBytes];
  alignas(64) std::byte next[kTileBytes];
  for (size_t begin = 0; begin < args.numel; begin += kTileNumel) {
    reduce_tile(plan, args, begin, std::min(kTileNumel, args.numel - begin), sum, next);
  }
}

}  // namespace pycoll::cpu
