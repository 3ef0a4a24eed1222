// The operators of pycoll/ops.py: their schemas, and what they do on a CPU. Fakes and derivatives are written in Python there.
#include "torch/operators.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "base/error.h"
#include "kernels/cpu/block_quantise.h"
#include "torch/errors.h"
#include "torch/tensors.h"

namespace pycoll::torch_adapter {
namespace {

using Tensors = std::vector<at::Tensor>;

thread_local const cpu::BucketFunctions* replaced_functions = nullptr;

const cpu::BucketFunctions& bucket_functions() {
  static constexpr cpu::BucketFunctions kOfCpu;
  return replaced_functions != nullptr ? *replaced_functions : kOfCpu;
}

// ---- arguments

DType dtype_of(at::ScalarType type, const char* argument) {
  const at::Tensor example = at::empty({0}, at::TensorOptions(type));
  PYCOLL_CHECK_ARG(!travels_as_bytes(example), argument, " is ", dtype_name(example),
                   ", which pycoll does not compute with; use float32, float16, bfloat16, "
                   "float8_e4m3fn or float8_e5m2");
  return elements_of(example).dtype;
}

DType code_dtype_of(at::ScalarType type, const char* argument) {
  const DType dtype = dtype_of(type, argument);
  PYCOLL_CHECK_ARG(cpu::is_code_dtype(dtype), argument, " is ", name(dtype),
                   ", but codes are float8_e4m3fn, float8_e5m2 or int8; choose one of these");
  return dtype;
}

void check_castable(DType from, const std::string& from_name, DType to, const char* to_name) {
  PYCOLL_CHECK_ARG(cpu::is_castable(from, to), from_name, " is ", name(from), " but ", to_name,
                   " is ", name(to),
                   ", and only float32, float16, bfloat16, float8_e4m3fn and float8_e5m2 are cast "
                   "to one another; give both the same dtype");
}

void check_arithmetic(DType dtype, double scale, bool accumulate) {
  PYCOLL_CHECK_ARG(cpu::has_arithmetic(dtype) || (scale == 1.0 && !accumulate), "scale is ", scale,
                   " and accumulate is ", accumulate ? "True" : "False", ", but elements of ",
                   name(dtype), " are moved as they are; leave scale at 1.0 and accumulate False");
}

void check_numel(const at::Tensor& tensor, const char* argument, size_t numel, const char* why) {
  PYCOLL_CHECK_ARG(static_cast<size_t>(tensor.numel()) == numel, argument, " has ", tensor.numel(),
                   " elements, but ", why, " ", numel, "; make them equal");
}

// ---- tensors and their places in a bucket

struct Entries {
  TensorSet set;  // keeps the tensors, or contiguous stand-ins for them
  std::vector<cpu::BucketEntry> entries;
  size_t numel = 0;
};

// Tensor i begins at element begins[i] of a bucket of `numel`; what no tensor covers becomes an absent entry.
Entries make_entries(const Tensors& tensors, at::IntArrayRef begins, int64_t numel, Role role) {
  PYCOLL_CHECK_ARG(tensors.size() == begins.size(), "tensors has ", tensors.size(),
                   " entries and begins ", begins.size(), "; give one number for each tensor");
  Entries result;
  result.entries.reserve(tensors.size());
  const auto skip_to = [&](size_t begin) {
    if (begin > result.numel)
      result.entries.push_back({nullptr, result.numel, begin - result.numel, DType::kUInt8});
    result.numel = std::max(result.numel, begin);
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    PYCOLL_CHECK_ARG(begins[i] >= static_cast<int64_t>(result.numel), "begins[", i, "] is ",
                     begins[i], ", but the tensors before it reach to element ", result.numel,
                     "; tensors follow one another without overlap");
    skip_to(static_cast<size_t>(begins[i]));
    // There are thousands of tensors: names are made only where they may be needed.
    if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided ||
        !tensor.is_non_overlapping_and_dense()) {
      check_tensor(tensor, concat("tensors[", i, "]").c_str(), role);
    }
    PYCOLL_CHECK_ARG(!travels_as_bytes(tensor), "tensors[", i, "] is ", dtype_name(tensor),
                     ", which pycoll does not compute with; convert it first");
    const Elements elements = elements_of(tensor);
    void* data = result.set.add(tensor, role);
    result.entries.push_back(
        {elements.numel == 0 ? nullptr : data, result.numel, elements.numel, elements.dtype});
    result.numel += elements.numel;
  }
  PYCOLL_CHECK_ARG(static_cast<int64_t>(result.numel) <= numel, "numel is ", numel,
                   ", but the tensors reach to element ", result.numel,
                   "; give the number of elements of the whole bucket");
  skip_to(static_cast<size_t>(numel));
  return result;
}

// A tensor that lies where it belongs in the bucket already is no overlap, if it is only moved.
void check_overlap(const Entries& entries, const at::Tensor& flat, const char* flat_name,
                   bool moves) {
  const auto* const begin = static_cast<const std::byte*>(flat.const_data_ptr());
  const auto* const end = begin + flat.nbytes();
  const DType dtype = elements_of(flat).dtype;
  for (size_t i = 0; i < entries.entries.size(); ++i) {
    const cpu::BucketEntry& entry = entries.entries[i];
    const auto* const data = static_cast<const std::byte*>(entry.data);
    if (data == nullptr || data >= end || data + entry.numel * itemsize(entry.dtype) <= begin)
      continue;
    PYCOLL_CHECK_ARG(moves && entry.dtype == dtype && data == begin + entry.begin * itemsize(dtype),
                     "tensors[", i, "] shares memory with ", flat_name,
                     ", and not as its own part that is only moved; give it memory of its own");
  }
}

void check_flat(const at::Tensor& flat, const char* argument, Role role) {
  check_tensor(flat, argument, role);
  PYCOLL_CHECK_ARG(flat.is_contiguous(), argument, " has strides ", flat.strides(),
                   "; pass a contiguous tensor");
}

void check_entries(const Entries& entries, DType flat_dtype, const char* flat_name, double scale,
                   bool accumulate) {
  for (size_t i = 0; i < entries.entries.size(); ++i) {
    const cpu::BucketEntry& entry = entries.entries[i];
    if (entry.data == nullptr) continue;
    if (!cpu::is_castable(entry.dtype, flat_dtype))
      check_castable(entry.dtype, concat("tensors[", i, "]"), flat_dtype, flat_name);
    check_arithmetic(entry.dtype, scale, accumulate);
  }
}

// As check_disjoint, from addresses that are known already.
void check_outputs_disjoint(const Entries& entries, const Tensors& tensors) {
  std::vector<std::pair<const std::byte*, const std::byte*>> intervals;
  intervals.reserve(entries.entries.size());
  for (const cpu::BucketEntry& entry : entries.entries) {
    const auto* const begin = static_cast<const std::byte*>(entry.data);
    if (begin != nullptr)
      intervals.emplace_back(begin, begin + entry.numel * itemsize(entry.dtype));
  }
  std::sort(intervals.begin(), intervals.end());
  bool overlap = entries.set.needs_copies();
  for (size_t i = 1; i < intervals.size(); ++i)
    overlap |= intervals[i - 1].second > intervals[i].first;
  if (overlap) check_disjoint(tensors, "tensors");
}

void write_back(const Entries& entries) {
  entries.set.copy_back();
  entries.set.bump_versions();
}

// ---- flatten and unflatten

void run_flatten(const Entries& entries, const at::Tensor& bucket, double scale, bool accumulate) {
  entries.set.fill_stand_ins();
  bucket_functions().flatten({entries.entries.data(),
                              entries.entries.size(),
                              bucket.mutable_data_ptr(),
                              elements_of(bucket).dtype,
                              scale,
                              accumulate,
                              {0, entries.numel}});
}

at::Tensor flatten(const Tensors& tensors, at::IntArrayRef begins, int64_t numel,
                   at::ScalarType dtype, double scale) {
  return translated([&] {
    const Entries entries = make_entries(tensors, begins, numel, Role::kInput);
    check_entries(entries, dtype_of(dtype, "dtype"), "dtype", scale, false);
    at::Tensor bucket = at::empty({static_cast<int64_t>(entries.numel)}, at::TensorOptions(dtype));
    run_flatten(entries, bucket, scale, false);
    return bucket;
  });
}

void flatten_into(const at::Tensor& bucket, const Tensors& tensors, at::IntArrayRef begins,
                  double scale, bool accumulate) {
  translated([&] {
    check_flat(bucket, "bucket", Role::kInOut);
    TensorSet target;
    target.add(bucket, Role::kInOut);
    const Entries entries = make_entries(tensors, begins, bucket.numel(), Role::kInput);
    check_entries(entries, dtype_of(bucket.scalar_type(), "bucket"), "bucket", scale, accumulate);
    check_overlap(entries, bucket, "bucket", scale == 1.0 && !accumulate);
    run_flatten(entries, bucket, scale, accumulate);
    target.bump_versions();
  });
}

void run_unflatten(const at::Tensor& bucket, const Entries& entries, double scale,
                   bool accumulate) {
  if (accumulate) entries.set.fill_stand_ins();
  bucket_functions().unflatten({entries.entries.data(),
                                entries.entries.size(),
                                const_cast<void*>(bucket.const_data_ptr()),
                                elements_of(bucket).dtype,
                                scale,
                                accumulate,
                                {0, entries.numel}});
}

Tensors unflatten(const at::Tensor& bucket, at::IntArrayRef numels, at::ScalarType dtype,
                  double scale) {
  return translated([&] {
    Tensors outputs;
    std::vector<int64_t> begins;
    int64_t numel = 0;
    for (size_t i = 0; i < numels.size(); ++i) {
      PYCOLL_CHECK_ARG(numels[i] >= 0, "numels[", i, "] is ", numels[i],
                       "; numbers of elements are not negative");
      outputs.push_back(at::empty({numels[i]}, at::TensorOptions(dtype)));
      begins.push_back(numel);
      numel += numels[i];
    }
    check_flat(bucket, "bucket", Role::kInput);
    check_numel(bucket, "bucket", static_cast<size_t>(numel), "numels add up to");
    const Entries entries = make_entries(outputs, begins, numel, Role::kOutput);
    const DType bucket_dtype = dtype_of(bucket.scalar_type(), "bucket");
    check_castable(bucket_dtype, "bucket", dtype_of(dtype, "dtype"), "dtype");
    check_arithmetic(bucket_dtype, scale, false);
    run_unflatten(bucket, entries, scale, false);
    return outputs;
  });
}

void unflatten_into(const at::Tensor& bucket, const Tensors& tensors, at::IntArrayRef begins,
                    double scale, bool accumulate) {
  translated([&] {
    check_flat(bucket, "bucket", Role::kInput);
    const Entries entries =
        make_entries(tensors, begins, bucket.numel(), accumulate ? Role::kInOut : Role::kOutput);
    check_entries(entries, dtype_of(bucket.scalar_type(), "bucket"), "bucket", scale, accumulate);
    check_overlap(entries, bucket, "bucket", scale == 1.0 && !accumulate);
    check_outputs_disjoint(entries, tensors);
    run_unflatten(bucket, entries, scale, accumulate);
    write_back(entries);
  });
}

// ---- quantisation

size_t checked_block(int64_t block) {
  PYCOLL_CHECK_ARG(block > 0, "block is ", block, "; give a positive number of elements");
  return static_cast<size_t>(block);
}

// 0: a scale a tensor.
size_t checked_block(int64_t block, const Tensors& tensors, const Entries& entries) {
  if (block != 0) return checked_block(block);
  PYCOLL_CHECK_ARG(tensors.size() == entries.entries.size(),
                   "block is 0, a scale for each tensor, but begins "
                   "leave gaps between tensors; pass zeros for those that are absent");
  return 0;
}

std::tuple<at::Tensor, at::Tensor> flatten_quantised(const Tensors& tensors, at::IntArrayRef begins,
                                                     int64_t numel, int64_t block,
                                                     at::ScalarType dtype, double scale) {
  return translated([&] {
    const Entries entries = make_entries(tensors, begins, numel, Role::kInput);
    check_entries(entries, DType::kFloat32, "what is quantised", scale, false);
    cpu::QuantisedBucketArgs args;
    args.codes_dtype = code_dtype_of(dtype, "dtype");
    args.entries = entries.entries.data();
    args.num_entries = entries.entries.size();
    args.numel = entries.numel;
    args.block = checked_block(block, tensors, entries);
    args.scale = scale;
    args.range = {0, args.num_scales()};
    at::Tensor codes = at::empty({static_cast<int64_t>(entries.numel)}, at::TensorOptions(dtype));
    at::Tensor scales =
        at::empty({static_cast<int64_t>(args.num_scales())}, at::TensorOptions(at::kFloat));
    args.codes = codes.mutable_data_ptr();
    args.scales = scales.mutable_data_ptr<float>();
    entries.set.fill_stand_ins();
    bucket_functions().flatten_quantised(args);
    return std::make_tuple(codes, scales);
  });
}

void check_codes(const at::Tensor& codes, const at::Tensor& scales, size_t num_scales) {
  check_tensor(codes, "codes", Role::kInput);
  code_dtype_of(codes.scalar_type(), "codes");
  check_tensor(scales, "scales", Role::kInput);
  PYCOLL_CHECK_ARG(scales.scalar_type() == at::kFloat, "scales is ", dtype_name(scales),
                   "; scales are float32");
  check_numel(scales, "scales", num_scales, "the number of blocks is");
}

void unflatten_quantised_into(const at::Tensor& codes, const at::Tensor& scales,
                              const Tensors& tensors, at::IntArrayRef begins, int64_t block,
                              double scale, bool accumulate) {
  translated([&] {
    check_flat(codes, "codes", Role::kInput);
    const Entries entries =
        make_entries(tensors, begins, codes.numel(), accumulate ? Role::kInOut : Role::kOutput);
    cpu::QuantisedBucketArgs args;
    args.entries = entries.entries.data();
    args.num_entries = entries.entries.size();
    args.numel = entries.numel;
    args.block = checked_block(block, tensors, entries);
    args.scale = scale;
    args.accumulate = accumulate;
    args.range = {0, args.num_scales()};
    check_codes(codes, scales, args.num_scales());
    check_entries(entries, DType::kFloat32, "what was quantised", scale, accumulate);
    check_overlap(entries, codes, "codes", false);
    check_overlap(entries, scales, "scales", false);
    check_outputs_disjoint(entries, tensors);
    const at::Tensor dense_scales = scales.contiguous();
    args.codes_dtype = elements_of(codes).dtype;
    args.codes = const_cast<void*>(codes.const_data_ptr());
    args.scales = const_cast<float*>(dense_scales.const_data_ptr<float>());
    if (accumulate) entries.set.fill_stand_ins();
    bucket_functions().unflatten_quantised(args);
    write_back(entries);
  });
}

// One tensor is a bucket of one entry.
std::tuple<at::Tensor, at::Tensor> quantise_blocks(const at::Tensor& tensor, int64_t block,
                                                   at::ScalarType dtype) {
  translated([&] {
    check_tensor(tensor, "tensor", Role::kInput);
    checked_block(block);
    check_castable(dtype_of(tensor.scalar_type(), "tensor"), "tensor", DType::kFloat32,
                   "what is quantised");
  });
  auto [codes, scales] = flatten_quantised({tensor}, {0}, tensor.numel(), block, dtype, 1.0);
  return {codes.view(tensor.sizes()), scales};
}

at::Tensor dequantise_blocks(const at::Tensor& codes, const at::Tensor& scales, int64_t block,
                             at::ScalarType dtype) {
  at::Tensor dense_codes;
  translated([&] {
    const auto numel = static_cast<size_t>(codes.numel());
    check_codes(codes, scales, ceil_div(numel, checked_block(block)));
    check_castable(DType::kFloat32, "what was quantised", dtype_of(dtype, "dtype"), "dtype");
    dense_codes = codes.contiguous();
  });
  at::Tensor output = at::empty(codes.sizes(), at::TensorOptions(dtype));
  unflatten_quantised_into(dense_codes, scales, {output}, {0}, block, 1.0, false);
  return output;
}

}  // namespace

const cpu::BucketFunctions* replace_bucket_functions(const cpu::BucketFunctions* functions) {
  return std::exchange(replaced_functions, functions);
}

TORCH_LIBRARY_FRAGMENT(pycoll, library) {
  // No argument has a default: the dispatcher drops what equals one, and derivatives would have to guess.
  // Tensor i begins at element begins[i] of a bucket of numel elements; what no tensor covers counts as absent.
  const auto define = [&](const char* schema) {
    library.def(schema, {at::Tag::pt2_compliant_tag});
  };
  define(
      "flatten(Tensor[] tensors, SymInt[] begins, SymInt numel, ScalarType dtype, float scale) "
      "-> Tensor");
  define(
      "flatten_into(Tensor(a!) bucket, Tensor[] tensors, SymInt[] begins, float scale, bool "
      "accumulate) -> ()");
  define("unflatten(Tensor bucket, SymInt[] numels, ScalarType dtype, float scale) -> Tensor[]");
  define(
      "unflatten_into(Tensor bucket, Tensor(a!)[] tensors, SymInt[] begins, float scale, bool "
      "accumulate) -> ()");
  // block: elements a scale; 0: a scale a tensor.
  define(
      "flatten_quantised(Tensor[] tensors, SymInt[] begins, SymInt numel, SymInt block, ScalarType "
      "dtype, float scale) -> (Tensor codes, Tensor scales)");
  define(
      "unflatten_quantised_into(Tensor codes, Tensor scales, Tensor(a!)[] tensors, SymInt[] "
      "begins, "
      "SymInt block, float scale, bool accumulate) -> ()");
  define(
      "quantise_blocks(Tensor tensor, SymInt block, ScalarType dtype) -> (Tensor codes, Tensor "
      "scales)");
  define(
      "dequantise_blocks(Tensor codes, Tensor scales, SymInt block, ScalarType dtype) -> Tensor");
}

// Sparse tensors come here, too, to be refused in pycoll's own words.
void implement(torch::Library& library) {
  library.impl("flatten", &flatten);
  library.impl("flatten_into", &flatten_into);
  library.impl("unflatten", &unflatten);
  library.impl("unflatten_into", &unflatten_into);
  library.impl("flatten_quantised", &flatten_quantised);
  library.impl("unflatten_quantised_into", &unflatten_quantised_into);
  library.impl("quantise_blocks", &quantise_blocks);
  library.impl("dequantise_blocks", &dequantise_blocks);
}

TORCH_LIBRARY_IMPL(pycoll, CPU, library) { implement(library); }
TORCH_LIBRARY_IMPL(pycoll, SparseCPU, library) { implement(library); }

// Codes and scales carry no gradient: autograd is passed by.
TORCH_LIBRARY_IMPL(pycoll, Autograd, library) {
  library.impl("quantise_blocks", torch::CppFunction::makeFallthrough());
  library.impl("flatten_quantised", torch::CppFunction::makeFallthrough());
}

}  // namespace pycoll::torch_adapter
