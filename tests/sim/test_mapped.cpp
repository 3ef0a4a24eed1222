// Kernels on tensors that all ranks see (mapped.cuh): values, and that a tensor is left alone until all have read it, under many seeds,
// strong and weak memory and, in that build, ThreadSanitizer. Kernels that write and read the tensor stand around them in each stream.
#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mapped.h"
#include "kernels/cuda/peer_access.cuh"
#include "kernels/cuda/thread_group.cuh"
#include "sanitizers.h"
#include "sim_group.h"

namespace pycoll::sim {
namespace {

using cuda::BlockGroup;
using cuda::Share;

constexpr size_t kNumel = 203;  // not a multiple of a unit's elements
constexpr int kCalls = 3;

// What a rank puts into its tensor before a call: small integers, whose sums are exact.
PYCOLL_HOST_DEVICE constexpr float value(int call, int rank, size_t i) {
  return static_cast<float>(
      (i * 7 + static_cast<size_t>(rank) * 13 + static_cast<size_t>(call) * 5) % 11);
}

struct FillKernel {
  struct Args {
    float* data;
    size_t numel;
    int call, rank;
  };
  static constexpr int kMaxThreads = 64;
  static PYCOLL_DEVICE void run(const Args& args) {
    const Share share = cuda::share_of_grid(BlockGroup());
    for (size_t i = share.first; i < args.numel; i += share.stride) {
      const float x = value(args.call, args.rank, i);
      uint32_t bits;
      std::memcpy(&bits, &x, sizeof(bits));
      cuda::peer::store_plain(reinterpret_cast<uint32_t*>(args.data) + i, bits);
    }
  }
};

struct CopyKernel {
  struct Args {
    float* from;
    float* to;
    size_t numel;
  };
  static constexpr int kMaxThreads = 64;
  static PYCOLL_DEVICE void run(const Args& args) {
    const Share share = cuda::share_of_grid(BlockGroup());
    for (size_t i = share.first; i < args.numel; i += share.stride)
      cuda::peer::store_plain(
          reinterpret_cast<uint32_t*>(args.to) + i,
          cuda::peer::load_plain(reinterpret_cast<const uint32_t*>(args.from) + i));
  }
};

enum class What { kAllReduce, kReduceScatter, kAllGather };

class MappedCase {
 public:
  MappedCase(What what, int world_size, const Options& options)
      : what_(what), group_({.world_size = world_size, .threads_per_block = 32}, options) {
    for (int i = 0; i < world_size; ++i) data_.emplace_back(group_.simulation, kNumel * 4);
    for (int i = 0; i < world_size * kCalls; ++i) out_.emplace_back(group_.simulation, kNumel * 4);
  }

  // Empty, or what went wrong.
  std::string run() {
    for (int call = 0; call < kCalls; ++call) {
      for (int rank = 0; rank < n(); ++rank) launch(call, rank);
    }
    const Report report = group_.simulation.run();
    if (!report.done()) return report.text;
    for (int call = 0; call < kCalls; ++call) {
      for (int rank = 0; rank < n(); ++rank) {
        const std::string complaint = compare(call, rank);
        if (!complaint.empty()) return complaint;
      }
    }
    return "";
  }

 private:
  static size_t at(int i) { return static_cast<size_t>(i); }
  int n() const { return group_.sizes.world_size; }
  float* data(int rank) { return data_[at(rank)].as<float>(); }
  float* out(int call, int rank) { return out_[at(call * n() + rank)].as<float>(); }
  Range chunk(int rank) const {  // of units, but for the last
    const Range units = part((kNumel + 3) / 4, at(n()), at(rank));
    const size_t end = std::min((units.begin + units.numel) * 4, kNumel);
    return {units.begin * 4, end - units.begin * 4};
  }

  void launch(int call, int rank) {
    void* const stream = group_.simulation.stream(rank);
    cuda::launch<FillKernel>({data(rank), kNumel, call, rank}, {2, 32}, stream);
    const Range own = chunk(rank);
    if (what_ == What::kAllGather) {
      cuda::SendMappedArgs args;
      args.group = group_.group(rank);
      args.staging = group_.direct();
      args.input = data(rank) + own.begin;
      args.nbytes = own.numel * sizeof(float);
      for (int peer = 0; peer < n(); ++peer)
        if (peer != rank) args.output.of_rank[peer] = data(peer) + own.begin;
      cuda::launch_send_mapped(args, group_.config(), stream);
    } else {
      cuda::ReduceMappedArgs args;
      args.group = group_.group(rank);
      args.staging = group_.direct();
      args.reduction = {DType::kFloat32, ReduceOp::kPremulSum, n(), factor(rank)};
      args.begin = own.begin;
      args.numel = own.numel;
      for (int peer = 0; peer < n(); ++peer) {
        args.input.of_rank[peer] = data(peer);
        const bool is_written = what_ == What::kAllReduce;
        if (is_written) args.output.of_rank[peer] = data(peer) + own.begin;
      }
      if (what_ == What::kReduceScatter) args.output.of_rank[rank] = out(call, rank);
      cuda::launch_reduce_mapped(args, group_.config(), stream);
    }
    if (what_ != What::kReduceScatter)
      cuda::launch<CopyKernel>({data(rank), out(call, rank), kNumel}, {2, 32}, stream);
  }

  static double factor(int rank) { return rank + 1.0; }
  float sum(int call, size_t i) const {
    float total = 0;
    for (int rank = 0; rank < n(); ++rank)
      total += static_cast<float>(factor(rank)) * value(call, rank, i);
    return total;
  }
  float expected(int call, int rank, size_t i) const {
    if (what_ == What::kAllReduce) return sum(call, i);
    if (what_ == What::kReduceScatter) return sum(call, chunk(rank).begin + i);
    int source = 0;
    while (i >= chunk(source).begin + chunk(source).numel) ++source;
    return value(call, source, i);
  }
  std::string compare(int call, int rank) {
    const size_t numel = what_ == What::kReduceScatter ? chunk(rank).numel : kNumel;
    for (size_t i = 0; i < numel; ++i) {
      if (out(call, rank)[i] != expected(call, rank, i))
        return "call " + std::to_string(call) + ", rank " + std::to_string(rank) + ", element " +
               std::to_string(i) + ": " + std::to_string(out(call, rank)[i]) + " instead of " +
               std::to_string(expected(call, rank, i));
    }
    return "";
  }

  const What what_;
  SimGroup group_;
  std::vector<DeviceMemory> data_, out_;
};

void run_seeds(What what) {
  const int num_seeds = kThreadSanitizer ? 2 : 12;
  for (int seed = 1; seed <= num_seeds; ++seed) {
    for (const Memory memory : {Memory::kStrong, Memory::kWeak}) {
      if (memory == Memory::kWeak && kThreadSanitizer) continue;
      Options options;
      options.seed = static_cast<uint64_t>(seed);
      options.memory = memory;
      options.preempt_percent = seed % 3 == 0 ? 50 : 10;
      const std::string complaint = MappedCase(what, 1 + seed % 4, options).run();
      CHECK(complaint.empty(), "seed %d, %s memory: %s", seed,
            memory == Memory::kWeak ? "weak" : "strong", complaint.c_str());
      if (!complaint.empty()) return;
    }
  }
}

TEST(all_reduce_mapped) { run_seeds(What::kAllReduce); }
TEST(reduce_scatter_mapped) { run_seeds(What::kReduceScatter); }
TEST(all_gather_mapped) { run_seeds(What::kAllGather); }

}  // namespace
}  // namespace pycoll::sim

int main(int argc, char** argv) { return run_tests(argc, argv); }
