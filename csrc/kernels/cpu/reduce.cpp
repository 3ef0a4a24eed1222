#include "kernels/cpu/reduce.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "kernels/cpu/tile_kernels.h"

namespace pycoll::cpu {
namespace {

constexpr size_t kTileBytes = kTileNumel * 16;  // the widest accumulate type has 16 bytes

// Short elements come in more of them: what a tile costs beside its elements should not weigh more than for float32.
size_t tile_numel(size_t storage_size, size_t accumulate_size) {
  return std::min(std::max(kTileNumel, kTileNumel * sizeof(float) / storage_size),
                  kTileBytes / accumulate_size);
}

// What is the same for all tiles of one reduction.
struct Plan {
  size_t storage_size, accumulate_size;
  WidenFn widen;
  NarrowFn narrow;
  CombineFn combine;
  ScaleFn scale;
  DivideFn divide;
  FusedSum fused;
};

// Two or more operands as they are stored, added up.
bool is_fusible(const ReduceArgs& args) {
  if ((args.op != ReduceOp::kSum && args.op != ReduceOp::kAvg) || args.num_operands < 2)
    return false;
  for (int i = 0; i < args.num_operands; ++i) {
    if (args.operands[i].accumulated) return false;
  }
  return true;
}

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
            args.divisor != 0 ? table.divide[wide] : nullptr,
            is_fusible(args) ? table.fused_sum[storage] : FusedSum{}};
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

// The sum of all operands: in storage type at `dst`, or in float32 in `sum` where `dst` is null.
void add_fused(const Plan& plan, const ReduceArgs& args, size_t begin, size_t numel, void* dst,
               std::byte* sum) {
  const auto tile = [&](int i) {
    return static_cast<const std::byte*>(args.operands[i].data) + begin * plan.storage_size;
  };
  const int last = args.num_operands - 1;
  if (last == 1 && dst != nullptr) return plan.fused.both(dst, tile(0), tile(1), numel);
  plan.fused.start(sum, tile(0), tile(1), numel);
  for (int i = 2; i < last; ++i) plan.fused.add(sum, sum, tile(i), numel);
  if (dst != nullptr) {
    plan.fused.finish(dst, sum, tile(last), numel);
  } else if (last > 1) {
    plan.fused.add(sum, sum, tile(last), numel);
  }
}

// Combines all operands in the accumulate type, in `sum` or, where the result is wanted so, at `last_target`; where it is.
const std::byte* combine_all(const Plan& plan, const ReduceArgs& args, size_t begin, size_t numel,
                             std::byte* sum, std::byte* next, std::byte* last_target) {
  const std::byte* result = load(plan, args.operands[0], begin, numel, sum);
  for (int i = 1; i < args.num_operands; ++i) {
    const std::byte* operand = load(plan, args.operands[i], begin, numel, next);
    // dst may be an operand that is read later, so it is written by the last combination only.
    std::byte* target = i + 1 == args.num_operands ? last_target : sum;
    plan.combine(target, result, operand, numel);
    result = target;
  }
  return result;
}

void reduce_tile(const Plan& plan, const ReduceArgs& args, size_t begin, size_t numel,
                 std::byte* sum, std::byte* next, std::byte* dst) {
  const bool is_fused = plan.fused.both != nullptr;
  const bool narrow = !args.dst_accumulated && plan.narrow != nullptr;
  if (is_fused && narrow && plan.divide == nullptr) {
    return add_fused(plan, args, begin, numel, dst, sum);
  }
  const std::byte* result = sum;
  if (is_fused) {
    add_fused(plan, args, begin, numel, nullptr, sum);
  } else {
    std::byte* target = narrow || plan.divide != nullptr ? sum : dst;
    result = combine_all(plan, args, begin, numel, sum, next, target);
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
}

}  // namespace

void reduce(const ReduceArgs& args) {
  const Plan plan = make_plan(args);
  const size_t result_size = args.dst_accumulated ? plan.accumulate_size : plan.storage_size;
  alignas(64) std::byte sum[kTileBytes];
  alignas(64) std::byte next[kTileBytes];
  const size_t most = tile_numel(plan.storage_size, plan.accumulate_size);
  for (size_t begin = 0; begin < args.numel; begin += most) {
    const size_t numel = std::min(most, args.numel - begin);
    std::byte* dst = static_cast<std::byte*>(args.dst) + begin * result_size;
    reduce_tile(plan, args, begin, numel, sum, next, dst);
    // All operands of this tile have been read.
    for (int i = 0; i < args.num_copies; ++i) {
      std::memcpy(static_cast<std::byte*>(args.copies[i]) + begin * result_size, dst,
                  numel * result_size);
    }
  }
}

}  // namespace pycoll::cpu
