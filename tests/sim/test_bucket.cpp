// Flatten, unflatten, quantise and dequantise against plain loops.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "kernels/cuda/bucket.h"
#include "random.h"
#include "reference.h"
#include "sim_group.h"
#include "test_data.h"
#include "wire_reference.h"

namespace pycoll::sim {
namespace {

using cuda::BucketArgs;
using cuda::BucketTensor;
using cuda::QuantiseArgs;

// ---- buckets

struct Pair {
  DType tensor, bucket;
};
constexpr DType kCastTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                DType::kFloat8E4M3FN, DType::kFloat8E5M2};

struct BucketCase {
  Pair dtypes;
  bool flatten = true;
  bool accumulate = false;
  int num_tensors = 20;
  size_t max_numel = 300;
  size_t align = 1;    // of the places in the bucket, in elements
  size_t missing = 0;  // every so many tensors; 0: none
  bool moves = false;  // nothing is computed
  // Elements by which every tensor, and the bucket, are off a multiple of 16 bytes; -1: random ones.
  int shift = -1;
};

// Tensors of random sizes at random alignments, laid out in a bucket with gaps.
class BucketRun {
 public:
  BucketRun(const BucketCase& what, uint64_t seed)
      : what_(what), random_(seed), group_({.world_size = 1}, {.seed = seed}) {
    lay_out();
    launch_and_check();
  }

 private:
  size_t tensor_item() const { return itemsize(what_.dtypes.tensor); }
  size_t bucket_item() const { return itemsize(what_.dtypes.bucket); }
  bool is_missing(size_t i) const { return what_.missing > 0 && i % what_.missing == 1; }

  void lay_out() {
    size_t place = 0;
    for (int i = 0; i < what_.num_tensors; ++i) {
      const size_t numel = random_.chance(10) ? 0 : 1 + random_.below(what_.max_numel);
      const size_t shift = (what_.shift >= 0  ? static_cast<size_t>(what_.shift)
                            : what_.align > 1 ? 0
                                              : random_.below(3)) *
                           tensor_item();
      tensors_.push_back(std::make_unique<Tensor>(group_, numel * tensor_item(), shift));
      tensors_.back()->assign(make_data(what_.dtypes.tensor, numel, i, 1));
      place = round_up(place + random_.below(3), what_.align);
      table_.push_back({is_missing(tensors_.size() - 1)
                            ? 0
                            : reinterpret_cast<uint64_t>(tensors_.back()->data()),
                        numel, place});
      place += numel;
    }
    numel_ = place;
    const size_t shift = what_.shift >= 0 ? static_cast<size_t>(what_.shift) * bucket_item() : 0;
    bucket_ = std::make_unique<Tensor>(group_, numel_ * bucket_item(), shift);
    bucket_->assign(make_data(what_.dtypes.bucket, numel_, 99, 2));
  }

  void launch_and_check() {
    const DeviceMemory table(group_.simulation, table_.size() * sizeof(BucketTensor));
    std::copy(table_.begin(), table_.end(), table.as<BucketTensor>());
    const DeviceMemory scale(group_.simulation, sizeof(float)), amax(group_.simulation, 4);
    *scale.as<float>() = 0.75f;
    BucketArgs args;
    args.tensors = table.as<BucketTensor>();
    args.num_tensors = table_.size();
    args.bucket = bucket_->data();
    args.bucket_numel = numel_;
    args.tensor_dtype = what_.dtypes.tensor;
    args.bucket_dtype = what_.dtypes.bucket;
    if (!what_.moves) {
      args.scale = 0.5;
      args.device_scale = scale.as<float>();
      args.accumulate = what_.accumulate;
      args.amax = amax.as<uint32_t>();
    }
    expect();
    const auto launch = what_.flatten ? cuda::launch_flatten : cuda::launch_unflatten;
    launch(args, {2, 64}, group_.simulation.stream(0));
    const Report report = group_.simulation.run();
    CHECK(report.done(), "%s", report.text.c_str());
    compare();
    if (what_.shift >= 0) check_vectors(report);
    if (what_.moves) return;
    float largest;
    std::memcpy(&largest, amax.get(), sizeof(largest));
    CHECK(largest == amax_ || (std::isnan(largest) && std::isnan(amax_)), "amax %g, not %g",
          static_cast<double>(largest), static_cast<double>(amax_));
  }

  void expect() {
    expected_bucket_ = bucket_->copy();
    for (size_t i = 0; i < table_.size(); ++i) {
      expected_tensors_.push_back(tensors_[i]->copy());
      Bytes& tensor = expected_tensors_.back();
      for (size_t k = 0; k < table_[i].numel; ++k) {
        uint8_t* const in_tensor = tensor.data() + k * tensor_item();
        uint8_t* const in_bucket = expected_bucket_.data() + (table_[i].begin + k) * bucket_item();
        if (is_missing(i)) {
          if (what_.flatten && !what_.accumulate) std::memset(in_bucket, 0, bucket_item());
        } else if (what_.flatten) {
          expect_element(what_.dtypes.tensor, in_tensor, what_.dtypes.bucket, in_bucket);
        } else {
          expect_element(what_.dtypes.bucket, in_bucket, what_.dtypes.tensor, in_tensor);
        }
      }
    }
  }

  void expect_element(DType from, const uint8_t* source, DType to, uint8_t* target) {
    if (what_.moves) {
      std::memcpy(target, source, itemsize(from));
    } else if (from == DType::kFloat64) {
      double x, before;
      std::memcpy(&x, source, sizeof(x));
      std::memcpy(&before, target, sizeof(before));
      note(static_cast<float>(x));
      const double product = x * 0.375;
      const double sum = what_.accumulate ? before + product : product;
      std::memcpy(target, &sum, sizeof(sum));
    } else {
      const float x = load_float(from, source);
      note(x);
      const float product = x * 0.375f;
      const float sum = what_.accumulate ? load_float(to, target) + product : product;
      store_float(to, target, saturated(to, sum));
    }
  }
  void note(float x) {
    if (std::isnan(x) || std::fabs(x) > amax_) amax_ = std::fabs(x);
  }
  static float saturated(DType to, float x) {
    const bool is_float8 = to == DType::kFloat8E4M3FN || to == DType::kFloat8E5M2;
    if (!is_float8 || !std::isfinite(x)) return x;
    const float largest = code_rule(to).largest;
    return std::clamp(x, -largest, largest);
  }

  // Everything is off by the same number of elements: all but heads and tails goes 16 bytes at once.
  void check_vectors(const Report& report) {
    const size_t run = 16 / std::min(tensor_item(), bucket_item());
    const size_t vectors = 1 + std::max(tensor_item(), bucket_item()) * run / 16;
    // Lanes look tensors up in the table, for each tile and each tensor in it.
    const size_t lookups = 32 * (ceil_div(numel_, 2048) + tensors_.size()) * 3 * 8;
    CHECK(report.accesses < numel_ / run * vectors + lookups, "%lu accesses for %zu elements",
          static_cast<unsigned long>(report.accesses), numel_);
  }

  void compare() {
    CHECK(first_difference(what_.dtypes.bucket, bucket_->copy(), expected_bucket_) < 0,
          "bucket of %s from %s, element %ld of %zu", name(what_.dtypes.bucket),
          name(what_.dtypes.tensor),
          first_difference(what_.dtypes.bucket, bucket_->copy(), expected_bucket_), numel_);
    CHECK(bucket_->guards_are_intact(), "%s", "wrote beside the bucket");
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const long different =
          first_difference(what_.dtypes.tensor, tensors_[i]->copy(), expected_tensors_[i]);
      CHECK(different < 0, "tensor %zu of %s, element %ld", i, name(what_.dtypes.tensor),
            different);
      CHECK(tensors_[i]->guards_are_intact(), "wrote beside tensor %zu", i);
    }
  }

  const BucketCase what_;
  Random random_;
  SimGroup group_;
  std::vector<std::unique_ptr<Tensor>> tensors_;
  std::vector<BucketTensor> table_;
  std::unique_ptr<Tensor> bucket_;
  size_t numel_ = 0;
  Bytes expected_bucket_;
  std::vector<Bytes> expected_tensors_;
  float amax_ = 0.0f;
};

// Each cast with and without accumulation, both ways; alignments take turns.
TEST(every_pair_flattens_and_unflattens) {
  uint64_t seed = 0;
  for (const DType tensor : kCastTypes)
    for (const DType bucket : kCastTypes)
      for (const bool flatten : {true, false})
        for (const bool accumulate : {false, true}) {
          ++seed;
          BucketRun({.dtypes = {tensor, bucket},
                     .flatten = flatten,
                     .accumulate = accumulate,
                     .align = seed / 3 % 2 == 0 ? size_t{16} : size_t{1},
                     .missing = 4},
                    seed);
        }
}

TEST(float64_is_computed_in_float64) {
  for (const bool flatten : {true, false})
    for (const bool accumulate : {false, true})
      BucketRun({.dtypes = {DType::kFloat64, DType::kFloat64},
                 .flatten = flatten,
                 .accumulate = accumulate,
                 .missing = 3},
                11);
}

// Every size of elements, with whatever is in them.
TEST(other_elements_are_moved) {
  for (const DType dtype :
       {DType::kBool, DType::kInt8, DType::kFloat16, DType::kInt16, DType::kComplex32,
        DType::kInt64, DType::kComplex64, DType::kFloat64, DType::kComplex128})
    for (const bool flatten : {true, false})
      for (const size_t align : {size_t{1}, size_t{16}})
        BucketRun({.dtypes = {dtype, dtype},
                   .flatten = flatten,
                   .align = align,
                   .missing = 4,
                   .moves = true},
                  align);
}

// A head of single elements, then vectors, then a tail.
TEST(what_is_misaligned_alike_goes_in_vectors) {
  for (const Pair dtypes :
       {Pair{DType::kFloat32, DType::kFloat32}, Pair{DType::kBFloat16, DType::kBFloat16},
        Pair{DType::kFloat8E5M2, DType::kFloat8E5M2}, Pair{DType::kFloat64, DType::kFloat64}})
    for (const bool flatten : {true, false})
      for (const int shift : {1, 3})
        BucketRun({.dtypes = dtypes,
                   .flatten = flatten,
                   .num_tensors = 3,
                   .max_numel = 9001,
                   .align = 16,
                   .shift = shift},
                  3);
}

TEST(thousands_of_tensors_in_one_launch) {
  for (const bool flatten : {true, false})
    BucketRun({.dtypes = {DType::kFloat32, DType::kBFloat16},
               .flatten = flatten,
               .num_tensors = 3000,
               .max_numel = 9},
              flatten);
}

TEST(a_tensor_larger_than_tiles) {
  BucketRun({.dtypes = {DType::kFloat32, DType::kFloat16},
             .num_tensors = 2,
             .max_numel = 20011,
             .align = 16},
            5);
}

TEST(what_cannot_be_cast_is_refused) {
  SimGroup group({.world_size = 1}, {});
  BucketArgs args;
  const auto is_refused = [&] {
    try {
      cuda::launch_flatten(args, {1, 32}, group.simulation.stream(0));
    } catch (const std::exception&) {
      return true;
    }
    return false;
  };
  args.tensor_dtype = args.bucket_dtype = DType::kInt32;
  CHECK(!is_refused(), "%s", "int32 is not moved");
  args.scale = 0.5;
  CHECK(is_refused(), "%s", "int32 is scaled");
  args.scale = 1.0;
  args.bucket_dtype = DType::kFloat32;
  CHECK(is_refused(), "%s", "int32 is cast");
  args.tensor_dtype = DType::kFloat64;
  CHECK(is_refused(), "%s", "float64 is cast");
}

TEST(an_empty_bucket) {
  BucketRun({.dtypes = {DType::kFloat32, DType::kFloat32}, .num_tensors = 0}, 1);
}

// ---- quantisation

struct QuantiseCase {
  DType data;
  CodeRule code;
  size_t numel, block_numel, shift;
  bool irregular = false;  // blocks whose sizes are given, the second one empty
};

class QuantiseRun {
 public:
  QuantiseRun(const QuantiseCase& what, uint64_t seed)
      : what_(what),
        group_({.world_size = 1}, {.seed = seed}),
        begins_(make_begins(what)),
        num_blocks_(begins_.size() - 1),
        data_(group_, what.numel * item(), what.shift * item()),
        back_(group_, what.numel * item(), what.shift * item()),
        codes_(group_, what.numel, what.shift),
        scales_(group_, num_blocks_ * sizeof(float), 0) {
    // Blocks of very different sizes: the last two hold zeros and a NaN.
    Random random(seed);
    size_t block = 0;
    for (size_t i = 0; i < what.numel; ++i) {
      while (i >= begins_[block + 1]) ++block;
      const int spread = what.data == DType::kFloat16 ? 3 : 20;
      float x = std::ldexp(random_float<float>(random), (static_cast<int>(block % 5) - 3) * spread);
      if (!std::isfinite(x)) x = 0.25f;
      if (block + 2 == num_blocks_) x = 0.0f;
      if (block + 1 == num_blocks_ && num_blocks_ > 2 && i % 7 == 0) x = NAN;
      store_float(what.data, data_.data() + i * item(), x);
    }
    run(true, data_);
    run(false, back_);
    check();
  }

 private:
  static std::vector<uint64_t> make_begins(const QuantiseCase& what) {
    std::vector<uint64_t> begins;
    for (uint64_t begin = 0; begin < what.numel; begin += what.block_numel) {
      begins.push_back(begin);
      if (what.irregular && begin == 0) begins.insert(begins.end(), {1, 1});
    }
    begins.push_back(what.numel);
    return begins;
  }

  size_t item() const { return itemsize(what_.data); }
  float value(Tensor& tensor, size_t i) {
    return load_float(what_.data, tensor.data() + i * item());
  }

  void run(bool quantise, Tensor& data) {
    QuantiseArgs args;
    args.data = data.data();
    args.codes = codes_.data();
    args.scales = reinterpret_cast<float*>(scales_.data());
    args.numel = what_.numel;
    args.block_numel = what_.block_numel;
    args.data_dtype = what_.data;
    args.code_dtype = what_.code.dtype;
    const DeviceMemory begins(group_.simulation, begins_.size() * sizeof(uint64_t));
    if (what_.irregular) {
      std::copy(begins_.begin(), begins_.end(), begins.as<uint64_t>());
      args.begins = begins.as<uint64_t>();
      args.num_blocks = num_blocks_;
    }
    const auto launch = quantise ? cuda::launch_quantise : cuda::launch_dequantise;
    launch(args, {2, 64}, group_.simulation.stream(0));
    const Report report = group_.simulation.run();
    CHECK(report.done(), "%s", report.text.c_str());
  }

  void check() {
    for (const Tensor* tensor : {&data_, &back_, &codes_, &scales_})
      CHECK(tensor->guards_are_intact(), "%s", "wrote beside a buffer");
    for (size_t block = 0; block < num_blocks_; ++block) check_block(block);
  }

  void check_block(size_t block) {
    const size_t begin = begins_[block], end = begins_[block + 1];
    std::vector<float> x;
    for (size_t i = begin; i < end; ++i) x.push_back(value(data_, i));
    const float expected = scale_of(what_.code, amax_of(x.data(), x.size()));
    float scale;
    std::memcpy(&scale, scales_.data() + block * sizeof(float), sizeof(scale));
    if (std::isnan(expected)) {
      CHECK(std::isnan(scale), "block %zu has the scale %g", block, static_cast<double>(scale));
      for (size_t i = begin; i < end; ++i)
        CHECK(codes_.data()[i] == 0 && std::isnan(value(back_, i)), "element %zu hides NaN", i);
      return;
    }
    CHECK(scale == expected, "block %zu: scale %g, not %g", block, static_cast<double>(scale),
          static_cast<double>(expected));
    for (size_t i = begin; i < end; ++i) check_element(i, expected);
  }

  void check_element(size_t i, float scale) {
    const float x = value(data_, i);
    const uint8_t code = code_of(what_.code, x, scale);
    CHECK(codes_.data()[i] == code, "element %zu: code %u, not %u", i, codes_.data()[i], code);
    const double error = std::fabs(static_cast<double>(value(back_, i)) - x);
    const double magnitude = std::fabs(static_cast<double>(x));
    double bound = what_.code.bound(magnitude, scale);
    // And the rounding to the data's own type, down to its subnormal numbers.
    if (what_.data == DType::kFloat16) bound += 0x1p-11 * (magnitude + bound) + 0x1p-25;
    if (what_.data == DType::kBFloat16) bound += 0x1p-8 * (magnitude + bound);
    CHECK(error <= bound, "element %zu of %s as %s: %g comes back as %g, scale %g", i,
          name(what_.data), name(what_.code.dtype), static_cast<double>(x),
          static_cast<double>(value(back_, i)), static_cast<double>(scale));
  }

  const QuantiseCase what_;
  SimGroup group_;
  const std::vector<uint64_t> begins_;
  const size_t num_blocks_;
  Tensor data_, back_, codes_, scales_;
};

TEST(quantised_data_comes_back_within_the_bound) {
  uint64_t seed = 0;
  for (const DType data : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
    for (const CodeRule& code : kCodeRules)
      for (const size_t block_numel : {size_t{32}, size_t{128}, size_t{37}, size_t{2000}})
        for (const size_t numel : {size_t{1}, size_t{127}, size_t{1021}}) {
          const size_t shift = ++seed % 3;
          QuantiseRun({data, code, numel, block_numel, shift, seed % 5 == 0}, seed);
        }
}

TEST(an_infinity_makes_its_block_nan) {
  SimGroup group({.world_size = 1}, {});
  Tensor data(group, 64 * 4, 0), codes(group, 64, 0), scales(group, 8, 0);
  for (size_t i = 0; i < 64; ++i)
    store_float(DType::kFloat32, data.data() + 4 * i, i == 5 ? -INFINITY : 1.0f);
  QuantiseArgs args{data.data(),     codes.data(), reinterpret_cast<float*>(scales.data()), 64, 32,
                    DType::kFloat32, DType::kInt8};
  cuda::launch_quantise(args, {1, 32}, group.simulation.stream(0));
  cuda::launch_dequantise(args, {1, 32}, group.simulation.stream(0));
  const Report report = group.simulation.run();
  CHECK(report.done(), "%s", report.text.c_str());
  for (size_t i = 0; i < 64; ++i) {
    const float x = load_float(DType::kFloat32, data.data() + 4 * i);
    CHECK(i < 32 ? std::isnan(x) : x == 1.0f, "element %zu is %g", i, static_cast<double>(x));
  }
}

}  // namespace
}  // namespace pycoll::sim

int main(int argc, char** argv) { return run_tests(argc, argv); }
