// Block-wise quantisation: its bound, and every instruction set against the formats' own decoding. docs/quantisation.md states
// what is checked here.
#include "block_reference.h"
#include "check.h"

using namespace pycoll;
using namespace pycoll::test;
using cpu::TileKernels;

namespace {

int at(DType dtype) { return static_cast<int>(dtype); }

std::vector<const TileKernels*> tables() {
  const TileKernels* found[cpu::kMostTileKernels];
  return {found, found + cpu::available_tile_kernels(found)};
}

}  // namespace

TEST(instruction_sets_quantise_alike) {
  std::vector<float> values;
  for (const DType dtype : {DType::kFloat8E4M3FN, DType::kFloat8E5M2}) {
    const FloatFormat& format = *float_format(dtype);
    for (uint32_t m = 0; m <= format.largest() + 1; ++m) {
      const double halfway = (format.finite(m) + format.finite(m + 1)) / 2;
      for (const double x : {format.finite(m), halfway}) {
        const auto y = static_cast<float>(x);
        for (const float z : {y, std::nextafterf(y, INFINITY), std::nextafterf(y, 0.f)}) {
          values.insert(values.end(), {z, -z});
        }
      }
    }
  }
  for (int i = -260; i <= 260; ++i) values.push_back(static_cast<float>(i) / 2);
  for (const float x : {0.0f, -0.0f, 1e-45f, FLT_MIN, FLT_MAX, -FLT_MAX}) values.push_back(x);
  std::mt19937 random(5);
  while (values.size() < 20011) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isfinite(x)) values.push_back(x);
  }
  for (const TileKernels* table : tables()) {
    for (const DType dtype : kCodes) {
      for (const float scale : {1.0f, 0.37f, FLT_MIN, 1e30f}) {
        Guarded<uint8_t> codes(values.size(), 1);
        Guarded<float> decoded(values.size());
        table->quantise[at(dtype)](codes.data(), values.data(), scale, values.size());
        table->dequantise[at(dtype)](decoded.data(), codes.data(), scale, values.size());
        size_t wrong = 0;
        for (size_t i = 0; i < values.size(); ++i) {
          const float y = values[i] / scale;
          if (!std::isfinite(y)) continue;  // of no block's scale
          const auto most = cpu::largest_code(dtype);
          const uint32_t want = encode(dtype, std::clamp(y, -most, most));
          wrong += codes[i] != want;
          wrong += bits_of(decoded[i]) != bits_of(decode(dtype, &want, 0) * scale);
        }
        CHECK(wrong == 0, "%s, %s, scale %g: %zu wrong", table->instruction_set, name(dtype),
              static_cast<double>(scale), wrong);
        CHECK(codes.intact() && decoded.intact());
      }
    }
  }
}

TEST(instruction_sets_decode_every_code_and_saturate_alike) {
  std::vector<uint8_t> all(256);
  for (size_t i = 0; i < 256; ++i) all[i] = static_cast<uint8_t>(i);
  const float nan = std::bit_cast<float>(0x7fc00000u);
  const float hard[] = {nan,    -nan,    INFINITY, -INFINITY, 464.0f, 465.0f,
                        480.0f, 61440.f, 61441.f,  65536.0f,  1e38f,  -1e38f};
  for (const TileKernels* table : tables()) {
    for (const DType dtype : kCodes) {
      std::vector<float> decoded(256);
      table->dequantise[at(dtype)](decoded.data(), all.data(), 1.0f, 256);
      for (size_t i = 0; i < 256; ++i) {
        CHECK(same(DType::kFloat32, bits_of(decoded[i]), bits_of(decode(dtype, all.data(), i))),
              "%s, %s, code %zu", table->instruction_set, name(dtype), i);
      }
      if (dtype == DType::kInt8) continue;
      for (const float x : hard) {
        uint8_t code = 0;
        table->saturate[at(dtype)](&code, &x, 1);
        CHECK(same(dtype, code, encode(dtype, x)), "%s, %s, %g", table->instruction_set,
              name(dtype), static_cast<double>(x));
      }
    }
  }
}

TEST(amax_is_the_same_everywhere) {
  std::mt19937 random(3);
  for (const size_t numel : {0, 1, 7, 16, 31, 127, 128, 1009}) {
    std::vector<float> data(numel);
    for (float& x : data) x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    uint32_t want = 0;
    for (const float x : data) want = std::max(want, bits_of(x) & 0x7fffffff);
    for (const TileKernels* table : tables()) {
      CHECK(table->amax(data.data(), numel) == want, "%s, %zu", table->instruction_set, numel);
    }
  }
}

TEST(a_scale_is_the_largest_that_stays_within_amax) {
  std::mt19937 random(11);
  for (const DType dtype : kCodes) {
    const double largest = static_cast<double>(cpu::largest_code(dtype));
    for (int i = 0; i < 20000; ++i) {
      const float amax = i == 0   ? FLT_MAX
                         : i == 1 ? 0.0f
                         : i == 2 ? 1e-45f
                                  : std::bit_cast<float>(static_cast<uint32_t>(random() >> 1));
      if (!std::isfinite(amax)) continue;
      const float scale = cpu::block_scale(bits_of(amax), dtype);
      CHECK(scale >= FLT_MIN);
      if (scale > FLT_MIN) {
        const auto next = static_cast<double>(std::nextafterf(scale, INFINITY));
        CHECK(static_cast<double>(scale) * largest <= static_cast<double>(amax));
        CHECK(next * largest > static_cast<double>(amax));
      }
    }
    CHECK(std::isnan(cpu::block_scale(0x7f800000, dtype)));
    CHECK(std::isnan(cpu::block_scale(0x7f800001, dtype)));
  }
}

TEST(quantisation_stays_within_its_bound) {
  for (const DType dtype : kCodes) {
    for (int kind = 0; kind < static_cast<int>(Kind::kCount); ++kind) {
      for (const size_t block : {1, 31, 128, 1000, 1024, 1031, 4099}) {
        for (const size_t numel : {0, 1, 2, 127, 1025, 5003}) {
          const std::vector<float> data = make_data(static_cast<Kind>(kind), numel, 17);
          Quantised quantised = quantise(data, block, dtype);
          const std::vector<float> back = dequantise(quantised, block, dtype);
          size_t wrong = 0;
          for (size_t i = 0; i < numel; ++i) {
            const double x = static_cast<double>(data[i]);
            const double y = static_cast<double>(back[i]);
            const auto scale = static_cast<double>(quantised.scales[i / block]);
            wrong += !(std::fabs(x - y) <= bound(dtype, x, scale));
            // No result is larger than the block's largest, nor has it another sign.
            wrong += std::signbit(x) != std::signbit(y) && y != 0;
          }
          CHECK(wrong == 0, "%s, kind %d, block %zu, numel %zu: %zu wrong", name(dtype), kind,
                block, numel, wrong);
          CHECK(quantised.codes.intact() && quantised.scales.intact());
        }
      }
    }
  }
}

TEST(a_block_that_is_not_finite_becomes_nan_and_its_neighbours_do_not) {
  for (const DType dtype : kCodes) {
    for (const float poison : {NAN, -NAN, INFINITY, -INFINITY}) {
      for (const size_t block : {7, 128, 1500}) {
        std::vector<float> data = make_data(Kind::kRandom, 3 * block + 5, 2);
        data[block + 3] = poison;
        Quantised quantised = quantise(data, block, dtype);
        const std::vector<float> back = dequantise(quantised, block, dtype);
        for (size_t i = 0; i < data.size(); ++i) {
          CHECK(std::isnan(back[i]) == (i / block == 1), "%s %zu", name(dtype), i);
        }
        for (size_t i = block; i < 2 * block; ++i) CHECK(quantised.codes[i] == 0);
      }
    }
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
