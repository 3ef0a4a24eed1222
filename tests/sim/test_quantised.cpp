// all_reduce with a quantised wire: bit by bit what plain loops give, and within the bound that launch.h states.
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "random.h"
#include "reference.h"
#include "sanitizers.h"
#include "sim_group.h"
#include "test_data.h"

namespace pycoll::sim {
namespace {

struct Wire {
  DType dtype;
  float largest;
  double relative, absolute;  // of the error: max(relative |x|, absolute scale)
};
constexpr Wire kWires[] = {{DType::kFloat8E4M3FN, 448, 0x1p-4, 0x1p-10},
                           {DType::kFloat8E5M2, 57344, 0x1p-3, 0x1p-17},
                           {DType::kInt8, 127, 0, 0.5}};

struct Case {
  DType dtype = DType::kFloat32;
  Wire wire = kWires[0];
  int world_size = 3;
  size_t numel = 1021;
  size_t block_numel = 128;
  size_t shift = 0;
  bool in_place = false;
  bool average = false;
};

// What a block of numbers becomes on the wire, and how far off each may be.
void pass_wire(const Wire& wire, std::vector<float>& x, std::vector<double>& error) {
  float amax = 0;
  for (const float v : x) amax = std::fmax(amax, std::fabs(v));
  const float scale = amax == 0 ? 1.0f : std::fmax(amax * (1.0f / wire.largest), 0x1p-126f);
  for (size_t i = 0; i < x.size(); ++i) {
    const double magnitude = std::fabs(static_cast<double>(x[i]));
    error[i] += std::fmax(wire.relative * magnitude, wire.absolute * scale) + 0x1p-21 * magnitude;
    uint8_t code;
    store_float(wire.dtype, &code, x[i] * (1.0f / scale));
    x[i] = load_float(wire.dtype, &code) * scale;
  }
}

class Run {
 public:
  Run(const Case& what, const Options& options)
      : what_(what),
        group_({.world_size = what.world_size, .slot_units = 70}, options),
        expected_(what.numel * item()),
        exact_(what.numel),
        bound_(what.numel) {
    Random random(options.seed);
    for (int rank = 0; rank < what.world_size; ++rank) launch(rank, random);
    for (size_t begin = 0; begin < what.numel; begin += what.block_numel) expect(begin);
    const Report report = group_.simulation.run();
    CHECK(report.done(), "%s", report.text.c_str());
    for (int rank = 0; rank < what.world_size; ++rank) compare(rank);
  }

 private:
  size_t item() const { return itemsize(what_.dtype); }

  void launch(int rank, Random& random) {
    inputs_.emplace_back(what_.numel * item());
    for (size_t i = 0; i < what_.numel; ++i) {
      const float x = random_float<float>(random);
      store_float(what_.dtype, inputs_.back().data() + i * item(), std::isfinite(x) ? x : 0.0f);
    }
    in_.push_back(std::make_unique<Tensor>(group_, what_.numel * item(), what_.shift * item()));
    in_.back()->assign(inputs_.back());
    out_.push_back(what_.in_place ? nullptr
                                  : std::make_unique<Tensor>(group_, what_.numel * item(), 0));
    cuda::AllReduceQuantisedArgs args;
    args.group = group_.group(rank);
    args.input = in_.back()->data();
    args.output = output(rank).data();
    args.numel = what_.numel;
    args.dtype = what_.dtype;
    args.wire_dtype = what_.wire.dtype;
    args.block_numel = what_.block_numel;
    args.divisor = what_.average ? what_.world_size : 0;
    args.staging = group_.direct();
    cuda::launch_all_reduce_quantised(args, group_.config(), group_.simulation.stream(rank));
  }
  Tensor& output(int rank) {
    const auto at = static_cast<size_t>(rank);
    return out_[at] ? *out_[at] : *in_[at];
  }

  void expect(size_t begin) {
    const size_t numel = std::min(what_.block_numel, what_.numel - begin);
    std::vector<float> sum(numel), x(numel);
    std::vector<double> error(numel), exact(numel);
    for (size_t rank = 0; rank < inputs_.size(); ++rank) {
      for (size_t i = 0; i < numel; ++i) {
        x[i] = load_float(what_.dtype, inputs_[rank].data() + (begin + i) * item());
        exact[i] += static_cast<double>(x[i]);
      }
      pass_wire(what_.wire, x, error);
      for (size_t i = 0; i < numel; ++i) sum[i] = rank == 0 ? x[i] : sum[i] + x[i];
    }
    const auto divisor = static_cast<float>(what_.average ? what_.world_size : 1);
    for (size_t i = 0; i < numel; ++i) {
      error[i] = error[i] / static_cast<double>(divisor);
      sum[i] /= divisor;
    }
    pass_wire(what_.wire, sum, error);
    for (size_t i = 0; i < numel; ++i) {
      store_float(what_.dtype, expected_.data() + (begin + i) * item(), sum[i]);
      exact_[begin + i] = exact[i] / static_cast<double>(divisor);
      bound_[begin + i] = error[i];
    }
  }

  void compare(int rank) {
    Tensor& result = output(rank);
    const long different = first_difference(what_.dtype, result.copy(), expected_);
    CHECK(different < 0, "rank %d of %d, %s as %s, element %ld of %zu", rank, what_.world_size,
          name(what_.dtype), name(what_.wire.dtype), different, what_.numel);
    CHECK(result.guards_are_intact(), "rank %d wrote beside its output", rank);
    const double own = what_.dtype == DType::kFloat32 ? 0x1p-22 : 0x1p-8;
    for (size_t i = 0; i < what_.numel; ++i) {
      const double y = static_cast<double>(load_float(what_.dtype, result.data() + i * item()));
      const double error = std::fabs(y - exact_[i]);
      CHECK(error <= bound_[i] * (1 + own) + own * std::fabs(exact_[i]) + 0x1p-24,
            "element %zu: %g, exactly %g", i, y, exact_[i]);
    }
  }

  const Case what_;
  SimGroup group_;
  std::vector<Bytes> inputs_;
  std::vector<std::unique_ptr<Tensor>> in_, out_;
  Bytes expected_;
  std::vector<double> exact_, bound_;
};

TEST(every_type_and_wire) {
  uint64_t seed = 0;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const Wire& wire : kWires) {
      for (const int world_size : {1, 2, 3, 4}) {
        ++seed;
        const size_t numels[] = {1021, 127, 1, 2048, 0};
        const size_t blocks[] = {128, 32, 512, 64};
        Run({.dtype = dtype,
             .wire = wire,
             .world_size = world_size,
             .numel = numels[seed % 5],
             .block_numel = blocks[seed % 4],
             .shift = seed % 3 == 0,
             .in_place = seed % 2 == 0,
             .average = seed % 4 < 2},
            {.seed = seed});
      }
    }
  }
}

TEST(many_seeds_and_weak_memory) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    for (const Memory memory : {Memory::kStrong, Memory::kWeak}) {
      if (kThreadSanitizer && memory == Memory::kWeak) continue;
      Run({.world_size = 2 + static_cast<int>(seed % 3), .numel = 1531, .block_numel = 64},
          {.seed = seed, .memory = memory});
    }
  }
}

}  // namespace
}  // namespace pycoll::sim

int main(int argc, char** argv) { return run_tests(argc, argv); }
