#include "kernels/cpu/bucket.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/block_quantise.h"

namespace pycoll::cpu {
namespace {

constexpr size_t kTileBytes = kTileNumel * sizeof(double);

bool is_narrow_float(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat8E4M3FN ||
         dtype == DType::kFloat8E5M2;
}

// From elements of one dtype to elements of another, contiguous on both sides.
class Transfer {
 public:
  Transfer(DType from, DType to, double factor, bool accumulate)
      : table_(tile_kernels()),
        from_(from),
        to_(to),
        wide_(from == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32),
        factor_(factor),
        accumulate_(accumulate),
        copies_(from == to && factor == 1.0 && !accumulate) {}

  void run(void* to, const void* from, size_t numel) const {
    auto* out = static_cast<std::byte*>(to);
    const auto* in = static_cast<const std::byte*>(from);
    if (copies_) {
      if (out != in) std::memcpy(out, in, numel * itemsize(to_));
      return;
    }
    for (size_t begin = 0; begin < numel; begin += kTileNumel) {
      run_tile(out + begin * itemsize(to_), in + begin * itemsize(from_),
               std::min(kTileNumel, numel - begin));
    }
  }

 private:
  static int at(DType dtype) { return static_cast<int>(dtype); }

  void run_tile(std::byte* out, const std::byte* in, size_t numel) const {
    alignas(64) std::byte buffer[kTileBytes];
    alignas(64) std::byte present[kTileBytes];
    // Where the result needs no narrowing it is made in place.
    std::byte* const target = to_ == wide_ ? out : buffer;
    const std::byte* result = in;
    if (from_ != wide_) {
      result = to_ == wide_ && accumulate_ ? buffer : target;
      table_.widen[at(from_)](const_cast<std::byte*>(result), in, numel);
    }
    if (factor_ != 1.0) {
      std::byte* scaled = accumulate_ ? buffer : target;
      if (result != scaled) std::memcpy(scaled, result, numel * itemsize(wide_));
      table_.scale[at(wide_)](scaled, factor_, numel);
      result = scaled;
    }
    if (accumulate_) {
      const std::byte* there = out;
      if (to_ != wide_) {
        table_.widen[at(to_)](present, out, numel);
        there = present;
      }
      table_.combine[at(wide_)][static_cast<int>(ReduceOp::kSum)](target, there, result, numel);
      result = target;
    }
    if (to_ != wide_) {
      const NarrowFn saturate = table_.saturate[at(to_)];
      (saturate != nullptr ? saturate : table_.narrow[at(to_)])(out, result, numel);
    }
  }

  const TileKernels& table_;
  const DType from_, to_, wide_;
  const double factor_;
  const bool accumulate_, copies_;
};

// fn(entry, offset in the entry, offset from `range.begin`, numel) for each part of an entry that lies in `range`.
template <class Fn>
void for_each_part(const BucketEntry* entries, size_t num_entries, Range range, const Fn& fn) {
  const size_t end = range.begin + range.numel;
  const BucketEntry* const last = entries + num_entries;
  const BucketEntry* entry = std::upper_bound(
      entries, last, range.begin,
      [](size_t begin, const BucketEntry& e) { return begin < e.begin + e.numel; });
  for (; entry != last && entry->begin < end; ++entry) {
    const size_t begin = std::max(entry->begin, range.begin);
    const size_t part_end = std::min(entry->begin + entry->numel, end);
    if (begin < part_end) fn(*entry, begin - entry->begin, begin - range.begin, part_end - begin);
  }
}

std::byte* element(const BucketEntry& entry, size_t offset) {
  return static_cast<std::byte*>(entry.data) + offset * itemsize(entry.dtype);
}

// The entries' elements in `range`, times `factor`, at `bucket`.
void gather(const BucketEntry* entries, size_t num_entries, Range range, std::byte* bucket,
            DType dtype, double factor, bool accumulate) {
  for_each_part(
      entries, num_entries, range,
      [&](const BucketEntry& entry, size_t offset, size_t at, size_t numel) {
        std::byte* to = bucket + at * itemsize(dtype);
        if (entry.data != nullptr) {
          Transfer(entry.dtype, dtype, factor, accumulate).run(to, element(entry, offset), numel);
        } else if (!accumulate) {
          std::memset(to, 0, numel * itemsize(dtype));
        }
      });
}

void scatter(const BucketEntry* entries, size_t num_entries, Range range, const std::byte* bucket,
             DType dtype, double factor, bool accumulate) {
  for_each_part(entries, num_entries, range,
                [&](const BucketEntry& entry, size_t offset, size_t at, size_t numel) {
                  if (entry.data == nullptr) return;
                  Transfer(dtype, entry.dtype, factor, accumulate)
                      .run(element(entry, offset), bucket + at * itemsize(dtype), numel);
                });
}

// fn(elements, block, first scale) for what is to be done at once: all of the range, or, with a scale a tensor, one tensor.
template <class Fn>
void for_each_stretch(const QuantisedBucketArgs& args, const Fn& fn) {
  const size_t end = args.range.begin + args.range.numel;
  if (args.block > 0) {
    const size_t begin = std::min(args.range.begin * args.block, args.numel);
    fn(Range{begin, std::min(end * args.block, args.numel) - begin}, args.block, args.range.begin);
    return;
  }
  for (size_t i = args.range.begin; i < end; ++i) {
    const BucketEntry& entry = args.entries[i];
    fn(Range{entry.begin, entry.numel}, std::max<size_t>(entry.numel, 1), i);
  }
}

}  // namespace

bool is_castable(DType from, DType to) {
  const auto is_float = [](DType d) { return d == DType::kFloat32 || is_narrow_float(d); };
  return from == to || (is_float(from) && is_float(to));
}

bool has_arithmetic(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kFloat32 || is_narrow_float(dtype);
}

void flatten(const BucketArgs& args) {
  gather(args.entries, args.num_entries, args.range,
         static_cast<std::byte*>(args.bucket) + args.range.begin * itemsize(args.dtype), args.dtype,
         args.scale, args.accumulate);
}

void unflatten(const BucketArgs& args) {
  scatter(args.entries, args.num_entries, args.range,
          static_cast<const std::byte*>(args.bucket) + args.range.begin * itemsize(args.dtype),
          args.dtype, args.scale, args.accumulate);
}

void flatten_quantised(const QuantisedBucketArgs& args) {
  for_each_stretch(args, [&](Range elements, size_t block, size_t first_scale) {
    float* const scales = args.scales + first_scale;
    const auto read = [&](size_t begin, size_t numel, float* buffer) -> const float* {
      gather(args.entries, args.num_entries, {elements.begin + begin, numel},
             reinterpret_cast<std::byte*>(buffer), DType::kFloat32, args.scale, false);
      return buffer;
    };
    if (elements.numel == 0 && args.block == 0) *scales = block_scale(0, args.codes_dtype);
    quantise_blocks(read, elements.numel, block, args.codes_dtype,
                    static_cast<std::byte*>(args.codes) + elements.begin, scales);
  });
}

void unflatten_quantised(const QuantisedBucketArgs& args) {
  for_each_stretch(args, [&](Range elements, size_t block, size_t first_scale) {
    const auto write = [&](size_t begin, size_t numel, const float* tile) {
      scatter(args.entries, args.num_entries, {elements.begin + begin, numel},
              reinterpret_cast<const std::byte*>(tile), DType::kFloat32, args.scale,
              args.accumulate);
    };
    dequantise_blocks(write, elements.numel, block, args.codes_dtype,
                      static_cast<const std::byte*>(args.codes) + elements.begin,
                      args.scales + first_scale);
  });
}

}  // namespace pycoll::cpu
