// Buckets against code that takes one element at a time.
#include "block_reference.h"
#include "check.h"
#include "kernels/cpu/bucket.h"

using namespace pycoll;
using namespace pycoll::test;
using cpu::BucketArgs;
using cpu::BucketEntry;
using cpu::QuantisedBucketArgs;

namespace {

constexpr DType kFloats[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                             DType::kFloat8E4M3FN, DType::kFloat8E5M2};

// ---- a bucket of tensors

struct Tensors {
  std::vector<Guarded<std::byte>> memory;
  std::vector<BucketEntry> entries;
  size_t numel = 0;

  bool intact() const {
    return std::all_of(memory.begin(), memory.end(), [](const auto& m) { return m.intact(); });
  }
};

// `count` tensors of sizes 0 to `most`; every fifth is absent.
Tensors make_tensors(size_t count, size_t most, DType dtype, uint32_t seed) {
  std::mt19937 random(seed);
  Tensors tensors;
  tensors.memory.reserve(count);
  for (size_t t = 0; t < count; ++t) {
    const size_t numel = t % 7 == 3 ? 0 : random() % (most + 1);
    tensors.memory.emplace_back(numel * itemsize(dtype), itemsize(dtype));
    std::byte* data = tensors.memory.back().data();
    const std::vector<float> values = make_data(Kind::kRandom, numel, seed + 1000 + random() % 999);
    for (size_t i = 0; i < numel; ++i) {
      const uint32_t code = encode(dtype, values[i]);
      std::memcpy(data + i * itemsize(dtype), &code, itemsize(dtype));
    }
    tensors.entries.push_back({t % 5 == 4 ? nullptr : data, tensors.numel, numel, dtype});
    tensors.numel += numel;
  }
  return tensors;
}

// What flattening leaves at one element.
uint32_t expected_code(const BucketArgs& args, DType from, const void* source, size_t i,
                       uint32_t present, DType to) {
  const bool plain = args.scale == 1.0 && !args.accumulate && from == to;
  if (plain) return code_at(from, source, i);
  const float factor = static_cast<float>(args.scale);
  float x = decode(from, source, i);
  if (args.scale != 1.0) x *= factor;
  if (args.accumulate) x = decode(to, &present, 0) + x;
  return encode(to, x);
}

void check_bucket(DType tensor_dtype, DType bucket_dtype, double scale, bool accumulate) {
  Tensors tensors = make_tensors(41, 1500, tensor_dtype, 7);
  const std::vector<float> before = make_data(Kind::kRandom, tensors.numel, 99);
  Guarded<std::byte> bucket(tensors.numel * itemsize(bucket_dtype), itemsize(bucket_dtype));
  for (size_t i = 0; i < tensors.numel; ++i) {
    const uint32_t code = encode(bucket_dtype, before[i]);
    std::memcpy(bucket.data() + i * itemsize(bucket_dtype), &code, itemsize(bucket_dtype));
  }
  Guarded<std::byte> original = bucket;
  BucketArgs args{tensors.entries.data(),
                  tensors.entries.size(),
                  bucket.data(),
                  bucket_dtype,
                  scale,
                  accumulate,
                  {0, tensors.numel}};
  // In three calls, as threads would share it.
  for (size_t part_index = 0; part_index < 3; ++part_index) {
    args.range = part(tensors.numel, 3, part_index);
    cpu::flatten(args);
  }
  size_t wrong = 0;
  for (const BucketEntry& entry : tensors.entries) {
    for (size_t i = 0; i < entry.numel; ++i) {
      const uint32_t present = code_at(bucket_dtype, original.data(), entry.begin + i);
      const uint32_t absent = accumulate ? present : 0;
      const uint32_t want = entry.data == nullptr ? absent
                                                  : expected_code(args, tensor_dtype, entry.data, i,
                                                                  present, bucket_dtype);
      wrong += !same(bucket_dtype, code_at(bucket_dtype, bucket.data(), entry.begin + i), want);
    }
  }
  CHECK(wrong == 0, "flatten %s to %s, scale %g, accumulate %d: %zu wrong", name(tensor_dtype),
        name(bucket_dtype), scale, accumulate, wrong);
  CHECK(bucket.intact() && tensors.intact());

  Tensors back = make_tensors(41, 1500, tensor_dtype, 7);
  Tensors untouched = make_tensors(41, 1500, tensor_dtype, 7);
  args.entries = back.entries.data();
  args.range = {0, tensors.numel};
  cpu::unflatten(args);
  wrong = 0;
  for (size_t t = 0; t < back.entries.size(); ++t) {
    const BucketEntry& entry = back.entries[t];
    for (size_t i = 0; i < entry.numel; ++i) {
      const uint32_t present = code_at(tensor_dtype, untouched.memory[t].data(), i);
      const uint32_t want = entry.data == nullptr
                                ? present
                                : expected_code(args, bucket_dtype, bucket.data(), entry.begin + i,
                                                present, tensor_dtype);
      wrong += !same(tensor_dtype, code_at(tensor_dtype, back.memory[t].data(), i), want);
    }
  }
  CHECK(wrong == 0, "unflatten %s to %s, scale %g, accumulate %d: %zu wrong", name(bucket_dtype),
        name(tensor_dtype), scale, accumulate, wrong);
  CHECK(back.intact());
}

}  // namespace

TEST(buckets_of_every_pair_of_dtypes) {
  for (const DType tensor_dtype : kFloats) {
    for (const DType bucket_dtype : kFloats) {
      for (const double scale : {1.0, 0.3}) {
        for (const bool accumulate : {false, true}) {
          check_bucket(tensor_dtype, bucket_dtype, scale, accumulate);
        }
      }
    }
  }
}

TEST(buckets_of_float64_and_of_what_only_moves) {
  CHECK(cpu::is_castable(DType::kInt64, DType::kInt64));
  CHECK(!cpu::is_castable(DType::kFloat64, DType::kFloat32));
  CHECK(!cpu::is_castable(DType::kInt8, DType::kFloat32) && !cpu::has_arithmetic(DType::kInt8));
  std::vector<double> a = {1.5, 1e300}, b = {2.5}, bucket = {1, 2, 3};
  BucketEntry entries[] = {{a.data(), 0, 2, DType::kFloat64}, {b.data(), 2, 1, DType::kFloat64}};
  BucketArgs args{entries, 2, bucket.data(), DType::kFloat64, 0.1, true, {0, 3}};
  cpu::flatten(args);
  CHECK(bucket[0] == 1 + 0.1 * 1.5 && bucket[1] == 2 + 0.1 * 1e300 && bucket[2] == 3 + 0.1 * 2.5);
  std::vector<int64_t> x = {1, -2}, out = {0, 0, 7};
  BucketEntry moved[] = {{x.data(), 0, 2, DType::kInt64}, {nullptr, 2, 1, DType::kInt64}};
  cpu::flatten({moved, 2, out.data(), DType::kInt64, 1.0, false, {0, 3}});
  CHECK(out[0] == 1 && out[1] == -2 && out[2] == 0);
}

TEST(thousands_of_tensors_in_one_call) {
  Tensors tensors = make_tensors(5003, 29, DType::kFloat32, 23);
  Guarded<float> bucket(tensors.numel, 1);
  cpu::flatten({tensors.entries.data(),
                tensors.entries.size(),
                bucket.data(),
                DType::kFloat32,
                1.0,
                false,
                {0, tensors.numel}});
  size_t wrong = 0;
  for (const BucketEntry& entry : tensors.entries) {
    for (size_t i = 0; i < entry.numel; ++i) {
      const float want = entry.data == nullptr ? 0.0f : decode(DType::kFloat32, entry.data, i);
      wrong += bits_of(bucket[entry.begin + i]) != bits_of(want);
    }
  }
  CHECK(wrong == 0, "%zu", wrong);
  CHECK(bucket.intact());
}

TEST(a_quantised_bucket_is_a_flattened_one_quantised) {
  for (const DType tensor_dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const DType dtype : kCodes) {
      for (const size_t block : {0, 1, 37, 128, 1024, 3001}) {
        Tensors tensors = make_tensors(53, 700, tensor_dtype, 31);
        std::vector<float> flat(tensors.numel);
        cpu::flatten({tensors.entries.data(),
                      tensors.entries.size(),
                      flat.data(),
                      DType::kFloat32,
                      0.5,
                      false,
                      {0, tensors.numel}});
        QuantisedBucketArgs args;
        args.entries = tensors.entries.data();
        args.num_entries = tensors.entries.size();
        args.numel = tensors.numel;
        args.codes_dtype = dtype;
        args.block = block;
        args.scale = 0.5;
        Guarded<uint8_t> codes(tensors.numel, 1);
        Guarded<float> scales(args.num_scales(), 1);
        args.codes = codes.data();
        args.scales = scales.data();
        for (size_t p = 0; p < 3; ++p) {
          args.range = part(args.num_scales(), 3, p);
          cpu::flatten_quantised(args);
        }
        size_t wrong = 0;
        const auto compare = [&](size_t begin, size_t numel, size_t b, const float* got) {
          const std::vector<float> piece(flat.begin() + static_cast<ptrdiff_t>(begin),
                                         flat.begin() + static_cast<ptrdiff_t>(begin + numel));
          Quantised want = quantise(piece, b, dtype);
          for (size_t i = 0; i < numel; ++i) wrong += codes[begin + i] != want.codes[i];
          for (size_t i = 0; i < ceil_div(numel, b); ++i) wrong += got[i] != want.scales[i];
        };
        if (block > 0) compare(0, tensors.numel, block, scales.data());
        for (size_t t = 0; block == 0 && t < tensors.entries.size(); ++t) {
          const BucketEntry& entry = tensors.entries[t];
          compare(entry.begin, entry.numel, std::max<size_t>(entry.numel, 1), scales.data() + t);
          if (entry.numel == 0) CHECK(scales[t] == FLT_MIN);
        }
        CHECK(wrong == 0, "%s as %s, block %zu: %zu wrong", name(tensor_dtype), name(dtype), block,
              wrong);
        CHECK(codes.intact() && scales.intact() && tensors.intact());

        Tensors back = make_tensors(53, 700, DType::kFloat32, 31);
        args.entries = back.entries.data();
        args.range = {0, args.num_scales()};
        args.scale = 2.0;
        cpu::unflatten_quantised(args);
        for (size_t t = 0; t < back.entries.size(); ++t) {
          const BucketEntry& entry = back.entries[t];
          for (size_t i = 0; entry.data != nullptr && i < entry.numel; ++i) {
            const size_t scale_index = block == 0 ? t : (entry.begin + i) / block;
            const float want = decode(dtype, codes.data(), entry.begin + i) * scales[scale_index];
            wrong += bits_of(decode(DType::kFloat32, entry.data, i)) != bits_of(want * 2.0f);
          }
        }
        CHECK(wrong == 0, "back from %s, block %zu: %zu wrong", name(dtype), block, wrong);
        CHECK(back.intact());
      }
    }
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
