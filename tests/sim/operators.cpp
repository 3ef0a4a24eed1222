// What pycoll's operators run on a CPU, done by simulated CUDA kernels instead: tests of the operators are then tests of the kernels.
// Tensors of several dtypes are one launch each; quantised buckets go through a bucket of float32.
#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <vector>

#include "kernels/cpu/bucket.h"
#include "kernels/cuda/bucket.h"
#include "simulation.h"

namespace pycoll::sim {
namespace {

uint64_t num_launches = 0;

constexpr cuda::LaunchConfig kConfig{2, 64};

// Runs what `launch_all(simulation)` launches.
template <class Fn>
void run(Fn launch_all) {
  Simulation simulation(1, {.seed = ++num_launches});
  launch_all(simulation);
  const Report report = simulation.run();
  if (!report.done()) throw std::runtime_error(report.text);
}

using Entries = std::vector<cpu::BucketEntry>;

void move(cuda::Direction direction, const Entries& entries, DType dtype,
          const cpu::BucketArgs& what) {
  std::vector<cuda::BucketTensor> table;
  for (const cpu::BucketEntry& entry : entries)
    table.push_back({reinterpret_cast<uint64_t>(entry.data), entry.numel, entry.begin});
  cuda::BucketArgs args;
  args.tensors = table.data();
  args.num_tensors = table.size();
  args.bucket = what.bucket;
  args.bucket_numel = table.back().begin + table.back().numel;
  args.tensor_dtype = dtype;
  args.bucket_dtype = what.dtype;
  args.scale = what.scale;
  args.accumulate = what.accumulate;
  run([&](Simulation& simulation) {
    BufferMap& buffers = simulation.buffers();
    buffers.add(table.data(), table.size() * sizeof(cuda::BucketTensor));
    buffers.add(what.bucket, args.bucket_numel * itemsize(what.dtype));
    const auto* const begin = static_cast<const std::byte*>(what.bucket);
    const auto* const end = begin + args.bucket_numel * itemsize(what.dtype);
    for (const cpu::BucketEntry& entry : entries) {
      const auto* const data = static_cast<const std::byte*>(entry.data);
      const bool is_part_of_bucket = data >= begin && data < end;
      if (data != nullptr && !is_part_of_bucket) buffers.add(data, entry.numel * itemsize(dtype));
    }
    const auto launch =
        direction == cuda::Direction::kFlatten ? cuda::launch_flatten : cuda::launch_unflatten;
    launch(args, kConfig, simulation.stream(0));
  });
}

void move_all(cuda::Direction direction, const cpu::BucketArgs& args) {
  std::map<DType, Entries> by_dtype;
  for (size_t i = 0; i < args.num_entries; ++i) {
    const cpu::BucketEntry& entry = args.entries[i];
    if (entry.numel == 0) continue;
    // Absent tensors have the bucket's own dtype as well as any.
    by_dtype[entry.data == nullptr ? args.dtype : entry.dtype].push_back(entry);
  }
  for (const auto& [dtype, entries] : by_dtype) move(direction, entries, dtype, args);
}

void simulate_flatten(const cpu::BucketArgs& args) { move_all(cuda::Direction::kFlatten, args); }
void simulate_unflatten(const cpu::BucketArgs& args) {
  move_all(cuda::Direction::kUnflatten, args);
}

// Between a bucket of float32 and codes.
void code(bool quantise, const cpu::QuantisedBucketArgs& what, std::vector<float>& bucket) {
  std::vector<uint64_t> begins;
  for (size_t i = 0; what.block == 0 && i < what.num_entries; ++i)
    begins.push_back(what.entries[i].begin);
  begins.push_back(what.numel);
  const cuda::QuantiseArgs args{.data = bucket.data(),
                                .codes = what.codes,
                                .scales = what.scales,
                                .numel = what.numel,
                                .block_numel = std::max<size_t>(what.block, 1),
                                .code_dtype = what.codes_dtype,
                                .begins = what.block == 0 ? begins.data() : nullptr,
                                .num_blocks = what.num_entries};
  run([&](Simulation& simulation) {
    BufferMap& buffers = simulation.buffers();
    buffers.add(bucket.data(), bucket.size() * sizeof(float));
    buffers.add(what.codes, what.numel);
    buffers.add(what.scales, what.num_scales() * sizeof(float));
    buffers.add(begins.data(), begins.size() * sizeof(uint64_t));
    const auto launch = quantise ? cuda::launch_quantise : cuda::launch_dequantise;
    launch(args, kConfig, simulation.stream(0));
  });
}

cpu::BucketArgs as_float_bucket(const cpu::QuantisedBucketArgs& args, std::vector<float>& bucket) {
  return {args.entries, args.num_entries, bucket.data(),  DType::kFloat32,
          args.scale,   args.accumulate,  {0, args.numel}};
}

void simulate_flatten_quantised(const cpu::QuantisedBucketArgs& args) {
  std::vector<float> bucket(args.numel);
  simulate_flatten(as_float_bucket(args, bucket));
  code(true, args, bucket);
}
void simulate_unflatten_quantised(const cpu::QuantisedBucketArgs& args) {
  std::vector<float> bucket(args.numel);
  code(false, args, bucket);
  simulate_unflatten(as_float_bucket(args, bucket));
}

constexpr cpu::BucketFunctions kFunctions{simulate_flatten, simulate_unflatten,
                                          simulate_flatten_quantised, simulate_unflatten_quantised};

}  // namespace
}  // namespace pycoll::sim

extern "C" {

// For pycoll._C.replace_bucket_functions.
const void* pycoll_sim_bucket_functions() { return &pycoll::sim::kFunctions; }
uint64_t pycoll_sim_num_launches() { return pycoll::sim::num_launches; }

}  // extern "C"
