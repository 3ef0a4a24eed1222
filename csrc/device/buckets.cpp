#include "device/buckets.h"

#include <algorithm>
#include <map>

#include "device/selection.h"

namespace pycoll::device {
namespace {

constexpr size_t kThreadsPerWarp = 32;
constexpr size_t kElementsPerWarp = 2048;  // what a warp of the bucket kernel takes at once
// More than fit a multiprocessor at once, so that none is idle at the end.
constexpr size_t kBlocksPerMultiprocessor = 4;

using Rows = std::vector<cuda::BucketTensor>;

// What each launch moves. An absent tensor is nothing but zeros, which have the bucket's dtype as well as any; where nothing is to
// be written for it, it is left out.
std::map<DType, Rows> rows_by_dtype(cuda::Direction direction, const cpu::BucketArgs& args) {
  const bool fills = direction == cuda::Direction::kFlatten && !args.accumulate;
  std::map<DType, Rows> rows;
  for (size_t i = 0; i < args.num_entries; ++i) {
    const cpu::BucketEntry& entry = args.entries[i];
    const bool is_absent = entry.data == nullptr;
    if (entry.numel == 0 || (is_absent && !fills)) continue;
    rows[is_absent ? args.dtype : entry.dtype].push_back(
        {reinterpret_cast<uint64_t>(entry.data), entry.numel, entry.begin});
  }
  return rows;
}

cpu::BucketArgs as_float_bucket(const cpu::QuantisedBucketArgs& args, void* bucket) {
  return {args.entries, args.num_entries, bucket,         DType::kFloat32,
          args.scale,   args.accumulate,  {0, args.numel}};
}

// The only tensor, if codes can be made from it, or it from codes, without a bucket between.
const cpu::BucketEntry* only_tensor(const cpu::QuantisedBucketArgs& args) {
  if (args.num_entries != 1 || args.scale != 1.0 || args.accumulate) return nullptr;
  const cpu::BucketEntry& entry = args.entries[0];
  const bool has_kernel = entry.dtype == DType::kFloat32 || entry.dtype == DType::kFloat16 ||
                          entry.dtype == DType::kBFloat16;
  return has_kernel && entry.data != nullptr ? &entry : nullptr;
}

}  // namespace

cuda::LaunchConfig Buckets::config(size_t work_of_warps) const {
  const int threads = sizes_of(device_->architecture()).threads_per_block;
  const size_t most =
      kBlocksPerMultiprocessor * static_cast<size_t>(device_->num_multiprocessors());
  const size_t blocks = ceil_div(work_of_warps, static_cast<size_t>(threads) / kThreadsPerWarp);
  return {static_cast<int>(std::clamp<size_t>(blocks, 1, most)), threads};
}

void Buckets::move(cuda::Direction direction, const cpu::BucketArgs& what, const Stream& stream) {
  const bool flattens = direction == cuda::Direction::kFlatten;
  const cuda::Launchers& launchers = device_->launchers();
  for (const auto& [dtype, rows] : rows_by_dtype(direction, what)) {
    const auto table = uploads_.upload(rows.data(), rows.size() * sizeof(rows[0]), stream);
    cuda::BucketArgs args;
    args.tensors = reinterpret_cast<const cuda::BucketTensor*>(table.get());
    args.num_tensors = rows.size();
    args.bucket = what.bucket;
    args.bucket_numel = rows.back().begin + rows.back().numel;
    args.tensor_dtype = dtype;
    args.bucket_dtype = what.dtype;
    args.scale = what.scale;
    args.accumulate = what.accumulate;
    const auto launch = flattens ? launchers.flatten : launchers.unflatten;
    launch(args, config(ceil_div(args.bucket_numel, kElementsPerWarp)), stream.handle);
  }
}

void Buckets::flatten(const cpu::BucketArgs& args, const Stream& stream) {
  move(cuda::Direction::kFlatten, args, stream);
}
void Buckets::unflatten(const cpu::BucketArgs& args, const Stream& stream) {
  move(cuda::Direction::kUnflatten, args, stream);
}

// Between codes and elements in a row at `data`.
void Buckets::code(bool quantises, const cpu::QuantisedBucketArgs& what, void* data,
                   DType data_dtype, const Stream& stream) {
  if (what.num_scales() == 0) return;
  cuda::QuantiseArgs args;
  args.data = data;
  args.codes = what.codes;
  args.scales = what.scales;
  args.numel = what.numel;
  args.data_dtype = data_dtype;
  args.code_dtype = what.codes_dtype;
  std::shared_ptr<std::byte> begins_of_blocks;
  if (what.block > 0) {
    args.block_numel = what.block;
  } else {
    std::vector<uint64_t> begins;
    for (size_t i = 0; i < what.num_entries; ++i) begins.push_back(what.entries[i].begin);
    begins.push_back(what.numel);
    begins_of_blocks = uploads_.upload(begins.data(), begins.size() * sizeof(begins[0]), stream);
    args.begins = reinterpret_cast<const uint64_t*>(begins_of_blocks.get());
    args.num_blocks = what.num_entries;
  }
  const cuda::Launchers& launchers = device_->launchers();
  const auto launch = quantises ? launchers.quantise : launchers.dequantise;
  launch(args, config(what.num_scales()), stream.handle);
}

void Buckets::flatten_quantised(const cpu::QuantisedBucketArgs& args, const Stream& stream) {
  if (const cpu::BucketEntry* tensor = only_tensor(args))
    return code(true, args, tensor->data, tensor->dtype, stream);
  const auto bucket = device_->scratch(args.numel * sizeof(float), stream);
  flatten(as_float_bucket(args, bucket.get()), stream);
  code(true, args, bucket.get(), DType::kFloat32, stream);
}

void Buckets::unflatten_quantised(const cpu::QuantisedBucketArgs& args, const Stream& stream) {
  if (const cpu::BucketEntry* tensor = only_tensor(args))
    return code(false, args, tensor->data, tensor->dtype, stream);
  const auto bucket = device_->scratch(args.numel * sizeof(float), stream);
  code(false, args, bucket.get(), DType::kFloat32, stream);
  unflatten(as_float_bucket(args, bucket.get()), stream);
}

}  // namespace pycoll::device
