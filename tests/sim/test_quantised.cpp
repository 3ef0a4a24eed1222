// Collectives on a quantised wire: bit by bit what plain loops give, and within the bound of docs/quantisation.md (both are checked
// by run_case).
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "collective_case.h"
#include "kernels/cuda/bucket.h"
#include "sanitizers.h"
#include "sim_group.h"
#include "test_data.h"
#include "wire_reference.h"

namespace pycoll::sim {
namespace {

constexpr Kernel kKernels[] = {Kernel::kAllReduceOneShot, Kernel::kAllReduceTwoShot,
                               Kernel::kReduceScatterDirect, Kernel::kAllGatherDirect};
constexpr DType kDataTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr size_t kBlocks[] = {128, 32, 512, 64, 256};

// `variant` decides all that is not given.
CollectiveCase make_case(Kernel kernel, DType dtype, DType codes, uint64_t variant) {
  constexpr size_t kNumels[] = {1021, 127, 1, 2048, 0, 509};
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kSum, ReduceOp::kMax,
                               ReduceOp::kPremulSum};
  CollectiveCase what{.kernel = kernel, .dtype = dtype};
  what.op = reduces(kernel) ? kOps[variant % 5] : ReduceOp::kSum;
  what.wire = {codes, kBlocks[variant % 5]};
  what.world_size = 1 + static_cast<int>(variant / 2 % 4);
  what.numel = kNumels[variant % 6];
  what.shift = variant % 3 == 0;
  what.in_place = variant % 2 == 0;
  what.num_blocks = 1 + static_cast<int>(variant % 3);
  what.slot_units = what.wire.block_numel / 16 * (1 + variant % 2) + 1;
  return what;
}

void check(const CollectiveCase& what, const Options& options) {
  const std::string complaint = run_case(what, options);
  CHECK(complaint.empty(), "seed %lu: %s", static_cast<unsigned long>(options.seed),
        complaint.c_str());
}

TEST(every_kernel_type_and_code) {
  uint64_t variant = 0;
  for (const Kernel kernel : kKernels)
    for (const DType dtype : kDataTypes)
      for (const CodeRule& rule : kCodeRules)
        for (int i = 0; i < 4; ++i) {
          ++variant;
          check(make_case(kernel, dtype, rule.dtype, variant), {.seed = variant});
        }
}

TEST(many_seeds_and_weak_memory) {
  for (const Kernel kernel : kKernels) {
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      for (const Memory memory : {Memory::kStrong, Memory::kWeak}) {
        if (kThreadSanitizer && memory == Memory::kWeak) continue;
        CollectiveCase what = make_case(kernel, DType::kFloat32, DType::kInt8, 0);
        what.world_size = 2 + static_cast<int>(seed % 3);
        what.numel = kernel == Kernel::kAllReduceOneShot ? 389 : 1531;
        what.wire.block_numel = 64;
        what.slot_units = 9;  // two blocks
        what.num_calls = 3;
        check(what, {.seed = seed, .preempt_percent = 30, .memory = memory});
      }
    }
  }
}

// Unwanted packets are written before a flag comes again, scales too.
TEST(epochs_wrap_around) {
  for (const uint32_t first : {0xfffffffdu, (1u << 30) - 4}) {
    for (const Kernel kernel : kKernels) {
      CollectiveCase what = make_case(kernel, DType::kBFloat16, DType::kFloat8E5M2, 5);
      what.world_size = 3;
      what.num_calls = 4;
      what.first_epoch = first;
      check(what, {});
    }
  }
}

// One-shot and two-shot give the same bits: both are compared with one result.
TEST(algorithms_agree) {
  for (const CodeRule& rule : kCodeRules) {
    for (const Kernel kernel : {Kernel::kAllReduceOneShot, Kernel::kAllReduceTwoShot}) {
      CollectiveCase what = make_case(kernel, DType::kFloat32, rule.dtype, 0);
      what.world_size = 4;
      what.numel = 613;
      what.wire.block_numel = 32;
      check(what, {.seed = 7});
    }
  }
}

// A ring needs no kernel of its own: codes and scales are made once, go around as bytes, and become numbers again.
TEST(a_ring_hands_codes_on_as_bytes) {
  constexpr int kRanks = 3;
  constexpr size_t kNumel = 317, kBlock = 64, kCodeBytes = 320, kRunBytes = kCodeBytes + 5 * 4;
  for (const CodeRule& rule : kCodeRules) {
    SimGroup group({.world_size = kRanks, .slot_units = 4}, {.seed = 3});
    std::vector<std::unique_ptr<Tensor>> in, wire, out;
    cuda::ChunkTable chunks;
    for (int rank = 0; rank < kRanks; ++rank) {
      chunks.begin[rank] = static_cast<size_t>(rank) * kRunBytes;
      chunks.numel[rank] = kRunBytes;
    }
    const auto quantise = [&](uint8_t* data, uint8_t* run) {
      return cuda::QuantiseArgs{data,      run,    reinterpret_cast<float*>(run + kCodeBytes),
                                kNumel,    kBlock, DType::kFloat32,
                                rule.dtype};
    };
    for (int rank = 0; rank < kRanks; ++rank) {
      in.push_back(std::make_unique<Tensor>(group, kNumel * 4, 0));
      in.back()->assign(make_data(DType::kFloat32, kNumel, rank, 0, Specials::kFew));
      wire.push_back(std::make_unique<Tensor>(group, kRanks * kRunBytes, 0));
      out.push_back(std::make_unique<Tensor>(group, kRanks * kNumel * 4, 0));
      void* const stream = group.simulation.stream(rank);
      uint8_t* const runs = wire.back()->data();
      cuda::launch_quantise(quantise(in.back()->data(), runs + chunks.begin[rank]), {2, 32},
                            stream);
      cuda::AllGatherRingArgs args;
      args.group = group.group(rank);
      args.input = runs + chunks.begin[rank];
      args.output = runs;
      args.chunks = chunks;
      args.staging = group.ring(rank);
      cuda::launch_all_gather_ring(args, group.config(), stream);
      for (size_t src = 0; src < kRanks; ++src)
        cuda::launch_dequantise(
            quantise(out.back()->data() + src * kNumel * 4, runs + src * kRunBytes), {2, 32},
            stream);
    }
    const Report report = group.simulation.run();
    CHECK(report.done(), "%s", report.text.c_str());
    for (size_t src = 0; src < kRanks; ++src) {
      WireValues expected = wire_values(DType::kFloat32, in[src]->data(), kNumel);
      expected.pass({rule.dtype, kBlock});
      Bytes bytes(kNumel * 4);
      std::memcpy(bytes.data(), expected.x.data(), bytes.size());
      for (const auto& output : out) {
        const uint8_t* const begin = output->data() + src * kNumel * 4;
        const Bytes got(begin, begin + kNumel * 4);
        CHECK(first_difference(DType::kFloat32, got, bytes) < 0, "%s from rank %zu",
              name(rule.dtype), src);
      }
    }
  }
}

template <class Fn>
std::string refusal(Fn fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(wrong_wires_are_refused) {
  SimGroup group({.world_size = 2}, {});
  cuda::AllReduceTwoShotArgs args;
  args.group = group.group(0);
  args.staging = group.direct();
  const auto launch = [&](DType dtype, cuda::WireFormat wire, ReduceOp op = ReduceOp::kSum) {
    args.reduction.dtype = dtype;
    args.reduction.op = op;
    args.wire = wire;
    cuda::launch_all_reduce_two_shot(args, group.config(), group.simulation.stream(0));
  };
  const struct {
    std::string text;
    const char* expected;
  } cases[] = {
      {refusal([&] { launch(DType::kFloat32, {DType::kInt8, 48}); }), "block is 48"},
      {refusal([&] { launch(DType::kFloat32, {DType::kInt8, 1024}); }), "block is 1024"},
      {refusal([&] { launch(DType::kInt32, {DType::kInt8, 64}); }), "the tensor is int32"},
      {refusal([&] { launch(DType::kFloat32, {DType::kInt16, 64}); }), "wire_dtype is int16"},
      {refusal([&] { launch(DType::kFloat32, {DType::kInt8, 64}, ReduceOp::kBor); }), "BOR"},
      {refusal([&] { launch(DType::kFloat32, {DType::kInt8, 256}); }), "slot_units"},
  };
  for (const auto& one : cases)
    CHECK(one.text.find(one.expected) != std::string::npos, "%s, not %s", one.text.c_str(),
          one.expected);
}

}  // namespace
}  // namespace pycoll::sim

int main(int argc, char** argv) { return run_tests(argc, argv); }
