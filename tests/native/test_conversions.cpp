// Conversions of the small floats and of integers, and every instruction set against the scalar code, bit for bit.
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <random>

#include "check.h"
#include "guarded.h"
#include "kernels/cpu/tile_kernels.h"
#include "reference_floats.h"

using namespace pycoll;
using namespace pycoll::test;
using pycoll::cpu::TileKernels;

namespace {

std::vector<const TileKernels*> tables() {
  const TileKernels* found[cpu::kMostTileKernels];
  const size_t count = cpu::available_tile_kernels(found);
  return {found, found + count};
}

int at(DType dtype) { return static_cast<int>(dtype); }

uint32_t load_code(const std::byte* data, size_t i, int bits) {
  if (bits == 8) return static_cast<uint8_t>(data[i]);
  uint16_t code;
  std::memcpy(&code, data + 2 * i, 2);
  return code;
}

// Every float between which and whose neighbours the format has to decide, and what else has gone wrong before.
std::vector<float> interesting_floats(const FloatFormat& format) {
  std::vector<float> list;
  const auto add = [&list](float x) {
    for (const float y : {x, std::nextafterf(x, INFINITY), std::nextafterf(x, -INFINITY)}) {
      list.push_back(y);
      list.push_back(-y);
    }
  };
  for (uint32_t m = 0; m <= format.largest(); ++m) {
    const double here = format.finite(m);
    const double next = format.finite(m + 1);
    add(static_cast<float>(here));
    add(static_cast<float>(here / 2 + next / 2));
    add(static_cast<float>(here * 0.75 + next * 0.25));
  }
  add(static_cast<float>(format.finite(format.largest() + 1)));
  for (const float x : {0.0f, 1e-45f, 1e-38f, FLT_MAX, 65504.0f, 65519.0f, 65520.0f}) add(x);
  for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0x7f800000u, 0x7fa00123u}) {
    list.push_back(std::bit_cast<float>(bits));
    list.push_back(std::bit_cast<float>(bits | 0x80000000u));
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i)
    list.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  return list;
}

}  // namespace

TEST(widening_every_code) {
  for (const TileKernels* table : tables()) {
    for (const FloatFormat& format : kFloatFormats) {
      const size_t numel = format.num_codes();
      std::vector<uint8_t> codes8(numel);
      std::vector<uint16_t> codes16(numel);
      for (size_t i = 0; i < numel; ++i) {
        codes8[i] = static_cast<uint8_t>(i);
        codes16[i] = static_cast<uint16_t>(i);
      }
      Guarded<float> wide(numel);
      const void* codes = format.bits == 8 ? static_cast<void*>(codes8.data()) : codes16.data();
      table->widen[at(format.dtype)](wide.data(), codes, numel);
      for (uint32_t code = 0; code < numel; ++code) {
        const double expected = format.decode(code);
        const bool right =
            std::isnan(expected)
                ? std::isnan(wide[code])
                : wide[code] == expected && std::signbit(wide[code]) == std::signbit(expected);
        CHECK(right, "%s %s code %#x: %g, not %g", table->instruction_set, name(format.dtype), code,
              static_cast<double>(wide[code]), expected);
      }
      CHECK(wide.intact());
    }
  }
}

TEST(narrowing_rounds_to_nearest_even) {
  for (const FloatFormat& format : kFloatFormats) {
    const Encoder encoder(format);
    std::vector<float> floats = interesting_floats(format);
    std::vector<uint32_t> expected;
    for (const float x : floats) expected.push_back(encoder.encode(static_cast<double>(x)));
    for (const TileKernels* table : tables()) {
      Guarded<std::byte> narrow(floats.size() * static_cast<size_t>(format.bits / 8));
      table->narrow[at(format.dtype)](narrow.data(), floats.data(), floats.size());
      size_t wrong = 0, first = 0;
      for (size_t i = 0; i < floats.size(); ++i) {
        const uint32_t code = load_code(narrow.data(), i, format.bits);
        const bool right = format.is_nan(expected[i]) ? format.is_nan(code) : code == expected[i];
        if (!right && wrong++ == 0) first = i;
      }
      CHECK(wrong == 0, "%s %s: %zu of %zu wrong, the first %a gives %#x and not %#x",
            table->instruction_set, name(format.dtype), wrong, floats.size(),
            static_cast<double>(floats[first]), load_code(narrow.data(), first, format.bits),
            expected[first]);
      CHECK(narrow.intact());
    }
  }
}

TEST(narrowing_what_was_widened_gives_the_code_back) {
  for (const TileKernels* table : tables()) {
    for (const FloatFormat& format : kFloatFormats) {
      const size_t size = static_cast<size_t>(format.bits / 8);
      const size_t numel = format.num_codes();
      std::vector<std::byte> codes(numel * size), back(numel * size);
      for (size_t i = 0; i < numel; ++i) std::memcpy(codes.data() + i * size, &i, size);
      std::vector<float> wide(numel);
      table->widen[at(format.dtype)](wide.data(), codes.data(), numel);
      table->narrow[at(format.dtype)](back.data(), wide.data(), numel);
      size_t wrong = 0;
      for (uint32_t code = 0; code < numel; ++code) {
        const uint32_t again = load_code(back.data(), code, format.bits);
        wrong += format.is_nan(code) ? !format.is_nan(again) : again != code;
      }
      CHECK(wrong == 0, "%s %s: %zu", table->instruction_set, name(format.dtype), wrong);
    }
  }
}

TEST(truth_values_are_one_or_zero) {
  for (const TileKernels* table : tables()) {
    std::vector<uint8_t> in(256), out(256);
    for (size_t i = 0; i < 256; ++i) in[i] = static_cast<uint8_t>(i);
    table->widen[at(DType::kBool)](out.data(), in.data(), 256);
    for (size_t i = 0; i < 256; ++i) CHECK(out[i] == (i != 0), "%zu", i);
    table->narrow[at(DType::kBool)](in.data(), in.data(), 256);
    CHECK(in == out);
  }
}

// ---- instruction sets against each other

namespace {

// Random bits, with many of the exponents that matter: half of the floats are ordinary numbers.
void fill(std::byte* data, size_t nbytes, DType dtype, unsigned seed) {
  std::mt19937 random(seed);
  for (size_t i = 0; i < nbytes; ++i) data[i] = static_cast<std::byte>(random());
  // Sums of 64-bit integers are far from the ends of 128 bits.
  for (size_t i = 0; dtype == DType::kInt128 && i + 16 <= nbytes; i += 16) {
    std::memset(data + i + 8, (data[i + 7] & std::byte{0x80}) != std::byte{0} ? 0xff : 0, 8);
  }
  const bool wide = dtype == DType::kFloat32 || dtype == DType::kComplex64;
  for (size_t i = 0; wide && i + 4 <= nbytes; i += 8) {
    const float x = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 7;
    std::memcpy(data + i, &x, 4);
  }
  const bool widest = dtype == DType::kFloat64 || dtype == DType::kComplex128;
  for (size_t i = 0; widest && i + 8 <= nbytes; i += 16) {
    const double x = static_cast<double>(static_cast<int>(random() % 2001) - 1000) / 7;
    std::memcpy(data + i, &x, 8);
  }
}

// Arithmetic may give either operand's NaN; everything else is the same to the bit.
bool same(const std::byte* a, const std::byte* b, size_t nbytes, DType dtype, bool arithmetic) {
  if (nbytes == 0 || std::memcmp(a, b, nbytes) == 0) return true;
  if (!arithmetic) return false;
  const auto equal = [&]<class T>(T) {
    for (size_t i = 0; i < nbytes; i += sizeof(T)) {
      T x, y;
      std::memcpy(&x, a + i, sizeof(T));
      std::memcpy(&y, b + i, sizeof(T));
      if (!(std::isnan(x) && std::isnan(y)) && std::memcmp(a + i, b + i, sizeof(T)) != 0)
        return false;
    }
    return true;
  };
  if (dtype == DType::kFloat32 || dtype == DType::kComplex64) return equal(0.0f);
  if (dtype == DType::kFloat64 || dtype == DType::kComplex128) return equal(0.0);
  return false;
}

constexpr size_t kNumels[] = {0,  1,  2,  3,  5,  7,   8,   9,    15,  16,
                              17, 31, 33, 63, 65, 127, 129, 1023, 1024};

// fn(table, dst, a, b, numel) must leave the same in dst for all tables; all three are shifted by elements in turn.
template <class Fn>
void compare_tables(const char* what, DType dst_dtype, DType src_dtype, bool arithmetic,
                    const Fn& fn) {
  const std::vector<const TileKernels*> all = tables();
  const size_t dst_size = itemsize(dst_dtype), src_size = itemsize(src_dtype);
  for (const size_t numel : kNumels) {
    for (size_t shift = 0; shift < 3; ++shift) {
      std::vector<std::byte> expected;
      for (const TileKernels* table : all) {
        Guarded<std::byte> a(numel * src_size, shift * src_size),
            b(numel * src_size, (shift + 1) * src_size);
        Guarded<std::byte> dst(numel * dst_size, (2 - shift) * dst_size);
        fill(a.data(), numel * src_size, src_dtype, 2 * static_cast<unsigned>(numel));
        fill(b.data(), numel * src_size, src_dtype, 2 * static_cast<unsigned>(numel) + 1);
        fn(*table, dst.data(), a.data(), b.data(), numel);
        CHECK(a.intact() && b.intact() && dst.intact(), "%s of %s", what, name(src_dtype));
        if (table == all[0]) {
          expected.assign(dst.data(), dst.data() + numel * dst_size);
        } else {
          CHECK(same(dst.data(), expected.data(), numel * dst_size, dst_dtype, arithmetic),
                "%s of %s, numel %zu: %s differs from %s", what, name(src_dtype), numel,
                table->instruction_set, all[0]->instruction_set);
        }
      }
    }
  }
}

}  // namespace

TEST(instruction_sets_agree_on_conversions) {
  for (int d = 0; d < kNumDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    if (tables()[0]->widen[d] == nullptr) continue;
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
      const DType wide = accumulate_dtype(dtype, op);
      if (wide == dtype && dtype != DType::kBool) continue;
      compare_tables("widening", wide, dtype, false,
                     [&](const TileKernels& table, void* dst, void* a, void*, size_t numel) {
                       table.widen[d](dst, a, numel);
                     });
      // Random wide integers are out of the range of what they are narrowed to: only the low bits are kept.
      compare_tables("narrowing", dtype, wide, false,
                     [&](const TileKernels& table, void* dst, void* a, void*, size_t numel) {
                       table.narrow[d](dst, a, numel);
                     });
    }
  }
}

TEST(instruction_sets_agree_on_arithmetic) {
  for (int d = 0; d < kNumDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (int o = 0; o < kNumReduceOps; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      const bool selects = op == ReduceOp::kMin || op == ReduceOp::kMax;
      for (const TileKernels* table : tables()) {
        CHECK((table->combine[d][o] == nullptr) == (tables()[0]->combine[d][o] == nullptr));
      }
      if (tables()[0]->combine[d][o] == nullptr) continue;
      compare_tables(name(op), dtype, dtype, !selects,
                     [&](const TileKernels& table, void* dst, void* a, void* b, size_t numel) {
                       table.combine[d][o](dst, a, b, numel);
                     });
      // In place, as the reductions call it.
      compare_tables(name(op), dtype, dtype, !selects,
                     [&](const TileKernels& table, void* dst, void* a, void* b, size_t numel) {
                       std::memcpy(dst, a, numel * itemsize(dtype));
                       table.combine[d][o](dst, dst, b, numel);
                     });
    }
    if (tables()[0]->scale[d] != nullptr) {
      compare_tables("scaling", dtype, dtype, true,
                     [&](const TileKernels& table, void* dst, void* a, void*, size_t numel) {
                       std::memcpy(dst, a, numel * itemsize(dtype));
                       table.scale[d](dst, 1.0 / 3, numel);
                     });
    }
    if (tables()[0]->divide[d] != nullptr) {
      compare_tables("division", dtype, dtype, true,
                     [&](const TileKernels& table, void* dst, void* a, void*, size_t numel) {
                       std::memcpy(dst, a, numel * itemsize(dtype));
                       table.divide[d](dst, 3, numel);
                     });
    }
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
