// The operators of pycoll/ops.py: their schemas, and what they do on a CPU and on a CUDA device (docs/cuda_path.md). Fakes and
// derivatives are written in Python there.
#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "base/error.h"
#include "kernels/cpu/block_quantise.h"
#include "torch/device_path.h"
#include "torch/errors.h"
#include "torch/tensors.h"

namespace pycoll::torch_adapter {
namespace {

using Tensors = std::vector<at::Tensor>;

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

// `first`: the argument that is on `where`.
void check_device(const at::Tensor& tensor, const std::string& argument, c10::Device where,
                  const char* first) {
  PYCOLL_CHECK_ARG(tensor.device() == where, argument, " is on ", tensor.device().str(), " but ",
                   first, " on ", where.str(), "; move one of them with .to()");
}

c10::Device device_of(const Tensors& tensors, c10::Device where, const char* first) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    // There are thousands of tensors: names are made only where they are needed.
    if (tensors[i].device() != where)
      check_device(tensors[i], concat("tensors[", i, "]"), where, first);
  }
  return where;
}
c10::Device device_of(const Tensors& tensors) {
  if (tensors.empty()) return c10::kCPU;
  return device_of(tensors, tensors[0].device(), "tensors[0]");
}

// ---- tensors and their places in a bucket

// One call of an operator.
struct Call {
  explicit Call(c10::Device where)
      : where(where), buckets(runs_on_device(where) ? &buckets_of(where) : nullptr), guard(where) {}

  const c10::Device where;         // of all tensors
  device::Buckets* const buckets;  // null: the CPU's functions
  const c10::DeviceGuard guard;
  // All tensors, or contiguous stand-ins for them: kept until what has been put into a stream is over.
  const std::shared_ptr<TensorSet> set = std::make_shared<TensorSet>();
  std::vector<cpu::BucketEntry> entries;
  size_t numel = 0;
};

// Tensor i begins at element begins[i] of a bucket of `numel`; what no tensor covers becomes an absent entry.
void add_entries(Call* call, const Tensors& tensors, at::IntArrayRef begins, int64_t numel,
                 Role role) {
  PYCOLL_CHECK_ARG(tensors.size() == begins.size(), "tensors has ", tensors.size(),
                   " entries and begins ", begins.size(), "; give one number for each tensor");
  call->entries.reserve(tensors.size());
  const auto skip_to = [&](size_t begin) {
    if (begin > call->numel)
      call->entries.push_back({nullptr, call->numel, begin - call->numel, DType::kUInt8});
    call->numel = std::max(call->numel, begin);
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    PYCOLL_CHECK_ARG(begins[i] >= static_cast<int64_t>(call->numel), "begins[", i, "] is ",
                     begins[i], ", but the tensors before it reach to element ", call->numel,
                     "; tensors follow one another without overlap");
    skip_to(static_cast<size_t>(begins[i]));
    if (tensor.layout() != at::kStrided || !tensor.is_non_overlapping_and_dense())
      check_tensor(tensor, concat("tensors[", i, "]").c_str(), role);
    PYCOLL_CHECK_ARG(!travels_as_bytes(tensor), "tensors[", i, "] is ", dtype_name(tensor),
                     ", which pycoll does not compute with; convert it first");
    const Elements elements = elements_of(tensor);
    void* data = call->set->add(tensor, role);
    call->entries.push_back(
        {elements.numel == 0 ? nullptr : data, call->numel, elements.numel, elements.dtype});
    call->numel += elements.numel;
  }
  PYCOLL_CHECK_ARG(static_cast<int64_t>(call->numel) <= numel, "numel is ", numel,
                   ", but the tensors reach to element ", call->numel,
                   "; give the number of elements of the whole bucket");
  skip_to(static_cast<size_t>(numel));
}

// A tensor that lies where it belongs in the bucket already is no overlap, if it is only moved.
void check_overlap(const Call& call, const at::Tensor& flat, const char* flat_name, bool moves) {
  const auto* const begin = static_cast<const std::byte*>(flat.const_data_ptr());
  const auto* const end = begin + flat.nbytes();
  const DType dtype = elements_of(flat).dtype;
  for (size_t i = 0; i < call.entries.size(); ++i) {
    const cpu::BucketEntry& entry = call.entries[i];
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

void check_entries(const Call& call, DType flat_dtype, const char* flat_name, double scale,
                   bool accumulate) {
  for (size_t i = 0; i < call.entries.size(); ++i) {
    const cpu::BucketEntry& entry = call.entries[i];
    if (entry.data == nullptr) continue;
    if (!cpu::is_castable(entry.dtype, flat_dtype))
      check_castable(entry.dtype, concat("tensors[", i, "]"), flat_dtype, flat_name);
    check_arithmetic(entry.dtype, scale, accumulate);
  }
}

// As check_disjoint, from addresses that are known already.
void check_outputs_disjoint(const Call& call, const Tensors& tensors) {
  std::vector<std::pair<const std::byte*, const std::byte*>> intervals;
  intervals.reserve(call.entries.size());
  for (const cpu::BucketEntry& entry : call.entries) {
    const auto* const begin = static_cast<const std::byte*>(entry.data);
    if (begin != nullptr)
      intervals.emplace_back(begin, begin + entry.numel * itemsize(entry.dtype));
  }
  std::sort(intervals.begin(), intervals.end());
  bool overlap = call.set->needs_copies();
  for (size_t i = 1; i < intervals.size(); ++i)
    overlap |= intervals[i - 1].second > intervals[i].first;
  if (overlap) check_disjoint(tensors, "tensors");
}

// Runs one of the bucket functions where the call's tensors lie: now, or in the current stream of their device.
template <class Args>
void run(const Call& call, const Args& args, void (*on_cpu)(const Args&),
         void (device::Buckets::*on_device)(const Args&, const device::Stream&)) {
  const std::shared_ptr<TensorSet>& set = call.set;
  if (call.buckets == nullptr) {
    set->fill_stand_ins();
    on_cpu(args);
    return set->copy_back();
  }
  device::Device& device = call.buckets->device();
  const device::Stream stream = device.current_stream();
  if (set->needs_copies()) device.run_on(stream, [set] { set->fill_stand_ins(); });
  (call.buckets->*on_device)(args, stream);
  if (set->needs_copies()) device.run_on(stream, [set] { set->copy_back(); });
  device.hold(set, stream);
}

// ---- flatten and unflatten

cpu::BucketArgs bucket_args(const Call& call, const at::Tensor& bucket, void* data, double scale,
                            bool accumulate) {
  return {call.entries.data(), call.entries.size(), data, elements_of(bucket).dtype, scale,
          accumulate,          {0, call.numel}};
}

at::Tensor flatten(const Tensors& tensors, at::IntArrayRef begins, int64_t numel,
                   at::ScalarType dtype, double scale) {
  return translated([&] {
    Call call(device_of(tensors));
    add_entries(&call, tensors, begins, numel, Role::kInput);
    check_entries(call, dtype_of(dtype, "dtype"), "dtype", scale, false);
    at::Tensor bucket =
        at::empty({static_cast<int64_t>(call.numel)}, at::TensorOptions(dtype).device(call.where));
    void* const data = call.set->add(bucket, Role::kOutput);
    run(call, bucket_args(call, bucket, data, scale, false), cpu::flatten,
        &device::Buckets::flatten);
    return bucket;
  });
}

void flatten_into(const at::Tensor& bucket, const Tensors& tensors, at::IntArrayRef begins,
                  double scale, bool accumulate) {
  translated([&] {
    check_flat(bucket, "bucket", Role::kInOut);
    Call call(device_of(tensors, bucket.device(), "bucket"));
    void* const data = call.set->add(bucket, Role::kInOut);
    add_entries(&call, tensors, begins, bucket.numel(), Role::kInput);
    check_entries(call, dtype_of(bucket.scalar_type(), "bucket"), "bucket", scale, accumulate);
    check_overlap(call, bucket, "bucket", scale == 1.0 && !accumulate);
    run(call, bucket_args(call, bucket, data, scale, accumulate), cpu::flatten,
        &device::Buckets::flatten);
    call.set->bump_versions();
  });
}

Tensors unflatten(const at::Tensor& bucket, at::IntArrayRef numels, at::ScalarType dtype,
                  double scale) {
  return translated([&] {
    check_flat(bucket, "bucket", Role::kInput);
    Call call(bucket.device());
    Tensors outputs;
    std::vector<int64_t> begins;
    int64_t numel = 0;
    for (size_t i = 0; i < numels.size(); ++i) {
      PYCOLL_CHECK_ARG(numels[i] >= 0, "numels[", i, "] is ", numels[i],
                       "; numbers of elements are not negative");
      outputs.push_back(at::empty({numels[i]}, at::TensorOptions(dtype).device(call.where)));
      begins.push_back(numel);
      numel += numels[i];
    }
    check_numel(bucket, "bucket", static_cast<size_t>(numel), "numels add up to");
    void* const data = call.set->add(bucket, Role::kInput);
    add_entries(&call, outputs, begins, numel, Role::kOutput);
    const DType bucket_dtype = dtype_of(bucket.scalar_type(), "bucket");
    check_castable(bucket_dtype, "bucket", dtype_of(dtype, "dtype"), "dtype");
    check_arithmetic(bucket_dtype, scale, false);
    run(call, bucket_args(call, bucket, data, scale, false), cpu::unflatten,
        &device::Buckets::unflatten);
    return outputs;
  });
}

void unflatten_into(const at::Tensor& bucket, const Tensors& tensors, at::IntArrayRef begins,
                    double scale, bool accumulate) {
  translated([&] {
    check_flat(bucket, "bucket", Role::kInput);
    Call call(device_of(tensors, bucket.device(), "bucket"));
    void* const data = call.set->add(bucket, Role::kInput);
    add_entries(&call, tensors, begins, bucket.numel(), accumulate ? Role::kInOut : Role::kOutput);
    check_entries(call, dtype_of(bucket.scalar_type(), "bucket"), "bucket", scale, accumulate);
    check_overlap(call, bucket, "bucket", scale == 1.0 && !accumulate);
    check_outputs_disjoint(call, tensors);
    run(call, bucket_args(call, bucket, data, scale, accumulate), cpu::unflatten,
        &device::Buckets::unflatten);
    call.set->bump_versions();
  });
}

// ---- quantisation

size_t checked_block(int64_t block) {
  PYCOLL_CHECK_ARG(block > 0, "block is ", block, "; give a positive number of elements");
  return static_cast<size_t>(block);
}

// Of a call whose entries are known. `block`: 0 is a scale a tensor.
cpu::QuantisedBucketArgs quantised_args(const Call& call, const Tensors& tensors, int64_t block,
                                        double scale) {
  PYCOLL_CHECK_ARG(block != 0 || tensors.size() == call.entries.size(),
                   "block is 0, a scale for each tensor, but begins "
                   "leave gaps between tensors; pass zeros for those that are absent");
  cpu::QuantisedBucketArgs args;
  args.entries = call.entries.data();
  args.num_entries = call.entries.size();
  args.numel = call.numel;
  args.block = block == 0 ? 0 : checked_block(block);
  args.scale = scale;
  args.range = {0, args.num_scales()};
  return args;
}

std::tuple<at::Tensor, at::Tensor> flatten_quantised(const Tensors& tensors, at::IntArrayRef begins,
                                                     int64_t numel, int64_t block,
                                                     at::ScalarType dtype, double scale) {
  return translated([&] {
    Call call(device_of(tensors));
    add_entries(&call, tensors, begins, numel, Role::kInput);
    check_entries(call, DType::kFloat32, "what is quantised", scale, false);
    cpu::QuantisedBucketArgs args = quantised_args(call, tensors, block, scale);
    args.codes_dtype = code_dtype_of(dtype, "dtype");
    const auto there = at::TensorOptions(call.where);
    at::Tensor codes = at::empty({static_cast<int64_t>(call.numel)}, there.dtype(dtype));
    at::Tensor scales =
        at::empty({static_cast<int64_t>(args.num_scales())}, there.dtype(at::kFloat));
    args.codes = call.set->add(codes, Role::kOutput);
    args.scales = static_cast<float*>(call.set->add(scales, Role::kOutput));
    run(call, args, cpu::flatten_quantised, &device::Buckets::flatten_quantised);
    return std::make_tuple(codes, scales);
  });
}

void check_codes(const at::Tensor& codes, const at::Tensor& scales, size_t num_scales) {
  check_tensor(codes, "codes", Role::kInput);
  code_dtype_of(codes.scalar_type(), "codes");
  check_tensor(scales, "scales", Role::kInput);
  check_device(scales, "scales", codes.device(), "codes");
  PYCOLL_CHECK_ARG(scales.scalar_type() == at::kFloat, "scales is ", dtype_name(scales),
                   "; scales are float32");
  check_numel(scales, "scales", num_scales, "the number of blocks is");
}

// To tensors that the call has as entries.
void decode(const Call& call, cpu::QuantisedBucketArgs args, const at::Tensor& codes,
            const at::Tensor& scales) {
  args.codes_dtype = elements_of(codes).dtype;
  args.codes = call.set->add(codes, Role::kInput);
  args.scales = static_cast<float*>(call.set->add(scales, Role::kInput));
  run(call, args, cpu::unflatten_quantised, &device::Buckets::unflatten_quantised);
}

void unflatten_quantised_into(const at::Tensor& codes, const at::Tensor& scales,
                              const Tensors& tensors, at::IntArrayRef begins, int64_t block,
                              double scale, bool accumulate) {
  translated([&] {
    check_flat(codes, "codes", Role::kInput);
    Call call(device_of(tensors, codes.device(), "codes"));
    add_entries(&call, tensors, begins, codes.numel(), accumulate ? Role::kInOut : Role::kOutput);
    cpu::QuantisedBucketArgs args = quantised_args(call, tensors, block, scale);
    args.accumulate = accumulate;
    check_codes(codes, scales, args.num_scales());
    check_entries(call, DType::kFloat32, "what was quantised", scale, accumulate);
    check_overlap(call, codes, "codes", false);
    check_overlap(call, scales, "scales", false);
    check_outputs_disjoint(call, tensors);
    decode(call, args, codes, scales);
    call.set->bump_versions();
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
  return translated([&] {
    const size_t numel_of_block = checked_block(block);
    check_codes(codes, scales, ceil_div(static_cast<size_t>(codes.numel()), numel_of_block));
    check_castable(DType::kFloat32, "what was quantised", dtype_of(dtype, "dtype"), "dtype");
    Call call(codes.device());
    at::Tensor output = at::empty(codes.sizes(), at::TensorOptions(dtype).device(call.where));
    add_entries(&call, {output}, {0}, output.numel(), Role::kOutput);
    decode(call, quantised_args(call, {output}, block, 1.0), codes, scales);
    return output;
  });
}

}  // namespace

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
// In every build: without kernels buckets_of() says how to build them.
TORCH_LIBRARY_IMPL(pycoll, CUDA, library) { implement(library); }
TORCH_LIBRARY_IMPL(pycoll, SparseCUDA, library) { implement(library); }

// Codes and scales carry no gradient: autograd is passed by.
TORCH_LIBRARY_IMPL(pycoll, Autograd, library) {
  library.impl("quantise_blocks", torch::CppFunction::makeFallthrough());
  library.impl("flatten_quantised", torch::CppFunction::makeFallthrough());
}

}  // namespace pycoll::torch_adapter
