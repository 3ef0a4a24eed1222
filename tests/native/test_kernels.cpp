// Reductions of every dtype and operator against code that takes one element at a time and does not care for speed: integers
// in 128 bits, floats in double, rounded after each operation to the type in which the kernels accumulate.
#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "base/error.h"
#include "check.h"
#include "guarded.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/tile_kernels.h"
#include "reference_floats.h"

using namespace pycoll;
using namespace pycoll::test;
using cpu::Operand;
using cpu::ReduceArgs;

namespace {

using Wide = __int128;

struct Case {
  DType dtype;
  ReduceOp op;
  int num_operands;
  size_t numel;
  int divisor;

  std::string text() const {
    return concat(name(op), " of ", num_operands, " x ", numel, " ", name(dtype), ", divisor ",
                  divisor);
  }
};

// ---- one element of the reference

struct Number {  // one of the two is used
  double re = 0, im = 0;
  Wide integer = 0;
};

bool is_signed(DType dtype) { return name(dtype)[0] == 'i'; }

const Encoder& encoder(DType dtype) {
  static const std::vector<Encoder> all = [] {
    std::vector<Encoder> list;
    for (const FloatFormat& format : kFloatFormats) list.emplace_back(format);
    return list;
  }();
  return all[static_cast<size_t>(float_format(dtype) - kFloatFormats)];
}

DType part_of(DType complex) {
  switch (complex) {
    case DType::kComplex32:
      return DType::kFloat16;
    case DType::kComplex64:
      return DType::kFloat32;
    default:
      return DType::kFloat64;
  }
}

double load_float(const std::byte* at, DType dtype) {
  if (dtype == DType::kFloat64) {
    double x;
    std::memcpy(&x, at, 8);
    return x;
  }
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, at, 4);
    return static_cast<double>(x);
  }
  uint32_t code = 0;
  std::memcpy(&code, at, itemsize(dtype));
  return float_format(dtype)->decode(code);
}

Number load(const std::byte* at, DType dtype) {
  Number number;
  switch (info(dtype).dtype_class) {
    case DTypeClass::kFloat:
      number.re = load_float(at, dtype);
      break;
    case DTypeClass::kComplex:
      number.re = load_float(at, part_of(dtype));
      number.im = load_float(at + itemsize(dtype) / 2, part_of(dtype));
      break;
    case DTypeClass::kBool:
      number.integer = *at != std::byte{0};
      break;
    case DTypeClass::kInteger: {
      const size_t size = itemsize(dtype);
      std::memcpy(&number.integer, at, size);
      const int unused = 128 - 8 * static_cast<int>(size);
      if (is_signed(dtype))
        number.integer =
            static_cast<Wide>(static_cast<unsigned __int128>(number.integer) << unused) >> unused;
      break;
    }
  }
  return number;
}

// To the precision of the accumulate type.
double rounded(double x, DType dtype) {
  const bool is_double = dtype == DType::kFloat64 || dtype == DType::kComplex128;
  return is_double ? x : static_cast<double>(static_cast<float>(x));
}

double combine_floats(double a, double b, ReduceOp op, DType dtype) {
  switch (op) {
    case ReduceOp::kProduct:
      return rounded(a * b, dtype);
    case ReduceOp::kMin:
      return std::isnan(a) || std::isnan(b) ? NAN : std::min(a, b);
    case ReduceOp::kMax:
      return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b);
    default:
      return rounded(a + b, dtype);
  }
}

// Integers wrap to `dtype` after each step, which load() of the low bytes does; sums of an average never do.
Wide wrapped(Wide x, DType dtype) {
  std::byte bytes[sizeof(Wide)];
  std::memcpy(bytes, &x, sizeof(x));
  return load(bytes, dtype).integer;
}

Wide combine_integers(Wide a, Wide b, ReduceOp op, DType dtype) {
  const auto product =
      static_cast<Wide>(static_cast<unsigned __int128>(a) * static_cast<unsigned __int128>(b));
  const bool truth = dtype == DType::kBool;
  switch (op) {
    case ReduceOp::kSum:
      return truth ? a | b : wrapped(a + b, dtype);
    case ReduceOp::kAvg:
      return a + b;
    case ReduceOp::kProduct:
      return truth ? a & b : wrapped(product, dtype);
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kBand:
      return a & b;
    case ReduceOp::kBor:
      return a | b;
    default:
      return a ^ b;
  }
}

Number combine(const Number& a, const Number& b, ReduceOp op, DType dtype) {
  Number result;
  switch (info(dtype).dtype_class) {
    case DTypeClass::kFloat:
      result.re = combine_floats(a.re, b.re, op, dtype);
      break;
    case DTypeClass::kComplex:
      if (op == ReduceOp::kProduct) {
        const auto times = [&](double x, double y) { return rounded(x * y, dtype); };
        result.re = rounded(times(a.re, b.re) - times(a.im, b.im), dtype);
        result.im = rounded(times(a.re, b.im) + times(a.im, b.re), dtype);
      } else {
        result.re = rounded(a.re + b.re, dtype);
        result.im = rounded(a.im + b.im, dtype);
      }
      break;
    default:
      result.integer = combine_integers(a.integer, b.integer, op, dtype);
  }
  return result;
}

Number scaled(Number x, double factor, DType dtype) {
  const double f = rounded(factor, dtype);
  return {rounded(x.re * f, dtype), rounded(x.im * f, dtype), x.integer};
}

Number divided(Number x, int divisor, DType dtype) {
  return {rounded(x.re / divisor, dtype), rounded(x.im / divisor, dtype), x.integer / divisor};
}

// Whether memory holds `expected`: to the bit, but any NaN stands for all, and MIN and MAX may give either zero.
bool holds_float(const std::byte* at, double expected, DType dtype, bool any_zero) {
  const double got = load_float(at, dtype);
  if (const FloatFormat* format = float_format(dtype)) {
    expected = format->decode(encoder(dtype).encode(expected));
  }
  if (std::isnan(expected)) return std::isnan(got);
  return got == expected && (any_zero || std::signbit(got) == std::signbit(expected));
}

bool holds(const std::byte* at, const Number& expected, const Case& c) {
  const bool any_zero = c.op == ReduceOp::kMin || c.op == ReduceOp::kMax;
  switch (info(c.dtype).dtype_class) {
    case DTypeClass::kFloat:
      return holds_float(at, expected.re, c.dtype, any_zero);
    case DTypeClass::kComplex:
      return holds_float(at, expected.re, part_of(c.dtype), any_zero) &&
             holds_float(at + itemsize(c.dtype) / 2, expected.im, part_of(c.dtype), any_zero);
    case DTypeClass::kBool:
      return *at == static_cast<std::byte>(expected.integer != 0);
    case DTypeClass::kInteger:
      return std::memcmp(at, &expected.integer, itemsize(c.dtype)) == 0;
  }
  return false;
}

// ---- whole arrays

constexpr double kFactors[] = {1.0, -0.5, 1.0 / 3, 3.0, 0.1};

using Array = Guarded<std::byte>;

// Arrays of random bits, of which two thirds are replaced by ordinary numbers where the type is a float.
std::vector<Array> random_operands(const Case& c, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Array> arrays;
  const size_t size = itemsize(c.dtype);
  const DTypeClass kind = info(c.dtype).dtype_class;
  const DType part = kind == DTypeClass::kComplex ? part_of(c.dtype) : c.dtype;
  for (int k = 0; k < c.num_operands; ++k) {
    Array array(c.numel * size, (static_cast<size_t>(k) * 3 + seed) % 7 * size);
    for (size_t i = 0; i < c.numel * size; ++i) array[i] = static_cast<std::byte>(random());
    const bool is_float = kind == DTypeClass::kFloat || kind == DTypeClass::kComplex;
    for (size_t i = 0; is_float && i < c.numel * size; i += itemsize(part)) {
      if (random() % 3 == 0) continue;
      const double x = (static_cast<double>(random() % 4001) - 2000) / 256;
      const float as_float = static_cast<float>(x);
      const uint32_t code = float_format(part) != nullptr ? encoder(part).encode(x)
                                                          : std::bit_cast<uint32_t>(as_float);
      if (part == DType::kFloat64) {
        std::memcpy(array.data() + i, &x, 8);
      } else {
        std::memcpy(array.data() + i, &code, itemsize(part));
      }
    }
    if (kind == DTypeClass::kBool) {
      for (size_t i = 0; i < c.numel; ++i) array[i] = static_cast<std::byte>(random() % 3);
    }
    arrays.push_back(std::move(array));
  }
  return arrays;
}

std::vector<Number> reference(const Case& c, std::vector<Array>& operands) {
  std::vector<Number> results(c.numel);
  const auto term = [&](int k, size_t i) {
    const Number x = load(operands[static_cast<size_t>(k)].data() + i * itemsize(c.dtype), c.dtype);
    return c.op == ReduceOp::kPremulSum ? scaled(x, kFactors[k], c.dtype) : x;
  };
  for (size_t i = 0; i < c.numel; ++i) {
    Number x = term(0, i);
    for (int k = 1; k < c.num_operands; ++k) x = combine(x, term(k, i), c.op, c.dtype);
    results[i] = c.divisor != 0 ? divided(x, c.divisor, c.dtype) : x;
  }
  return results;
}

std::vector<Operand> as_operands(std::vector<Array>& arrays) {
  std::vector<Operand> operands(arrays.size());
  for (size_t k = 0; k < arrays.size(); ++k) operands[k] = {arrays[k].data(), false, kFactors[k]};
  return operands;
}

ReduceArgs arguments(const Case& c, void* dst, const std::vector<Operand>& operands) {
  ReduceArgs args;
  args.dst = dst;
  args.operands = operands.data();
  args.num_operands = static_cast<int>(operands.size());
  args.numel = c.numel;
  args.dtype = c.dtype;
  args.op = c.op;
  args.divisor = c.divisor;
  return args;
}

void check_result(const Case& c, const char* how, Array& dst, const std::vector<Number>& expected) {
  size_t wrong = 0, first = 0;
  for (size_t i = 0; i < c.numel; ++i) {
    if (!holds(dst.data() + i * itemsize(c.dtype), expected[i], c) && wrong++ == 0) first = i;
  }
  CHECK(wrong == 0, "%s (%s): %zu wrong, the first at %zu", c.text().c_str(), how, wrong, first);
  CHECK(dst.intact(), "%s (%s): wrote beyond the end", c.text().c_str(), how);
}

void check_case(const Case& c, unsigned seed) {
  std::vector<Array> arrays = random_operands(c, seed);
  const std::vector<Number> expected = reference(c, arrays);
  {
    Array dst(c.numel * itemsize(c.dtype), seed % 5 * itemsize(c.dtype));
    const std::vector<Operand> operands = as_operands(arrays);
    cpu::reduce(arguments(c, dst.data(), operands));
    check_result(c, "out of place", dst, expected);
  }
  {  // the first operands make a partial result in the accumulate type, as the ring does
    const size_t wide = itemsize(accumulate_dtype(c.dtype, c.op));
    Array partial(c.numel * wide);
    const size_t split = static_cast<size_t>((c.num_operands + 1) / 2);
    std::vector<Operand> operands = as_operands(arrays);
    std::vector<Operand> rest(operands.begin() + static_cast<ptrdiff_t>(split), operands.end());
    operands.resize(split);
    ReduceArgs args = arguments(c, partial.data(), operands);
    args.dst_accumulated = true;
    args.divisor = 0;
    cpu::reduce(args);
    CHECK(partial.intact(), "%s (partial): wrote beyond the end", c.text().c_str());
    rest.insert(rest.begin(), Operand{partial.data(), true, 1.0});
    Array dst(c.numel * itemsize(c.dtype));
    cpu::reduce(arguments(c, dst.data(), rest));
    check_result(c, "from a partial result", dst, expected);
  }
  for (size_t k = 0; k < arrays.size(); ++k) {  // in place of each operand
    std::vector<Array> copies = arrays;
    const std::vector<Operand> operands = as_operands(copies);
    cpu::reduce(arguments(c, copies[k].data(), operands));
    check_result(c, "in place", copies[k], expected);
    for (size_t other = 0; other < arrays.size(); ++other) {
      if (other == k) continue;
      CHECK(std::memcmp(copies[other].data(), arrays[other].data(), c.numel * itemsize(c.dtype)) ==
                    0 &&
                copies[other].intact(),
            "%s: in place of operand %zu wrote to operand %zu", c.text().c_str(), k, other);
    }
  }
}

// In place of all operands at once, as ranks do that reach each other's tensors.
void check_copies(const Case& c, unsigned seed) {
  std::vector<Array> arrays = random_operands(c, seed);
  const std::vector<Number> expected = reference(c, arrays);
  const std::vector<Operand> operands = as_operands(arrays);
  std::vector<void*> copies;
  for (size_t k = 1; k < arrays.size(); ++k) copies.push_back(arrays[k].data());
  ReduceArgs args = arguments(c, arrays[0].data(), operands);
  args.copies = copies.data();
  args.num_copies = static_cast<int>(copies.size());
  cpu::reduce(args);
  for (Array& array : arrays) check_result(c, "in place of all", array, expected);
}

template <class Fn>
void for_each_valid(const Fn& fn) {
  for (int d = 0; d <= static_cast<int>(DType::kComplex128); ++d) {
    for (int o = 0; o < kNumReduceOps; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (is_valid(op, dtype)) fn(dtype, op);
    }
  }
}

}  // namespace

TEST(every_dtype_and_operator) {
  unsigned seed = 0;
  for_each_valid([&](DType dtype, ReduceOp op) {
    for (const int n : {1, 2, 3, 5}) {
      for (const size_t numel : {size_t{0}, size_t{1}, size_t{13}, size_t{67}, size_t{1023},
                                 size_t{1024}, size_t{2051}}) {
        if (numel > 100 && n != 3) continue;
        const Case c{dtype, op, n, numel, op == ReduceOp::kAvg ? n : 0};
        check_case(c, ++seed);
        check_copies(c, ++seed);
      }
    }
  });
}

namespace {

// Of two NaNs, an addition may keep the bits of either.
uint32_t without_payload(float x) { return x != x ? 0x7fc00000 : std::bit_cast<uint32_t>(x); }
uint32_t without_payload(uint16_t x, DType dtype) {
  const uint32_t largest = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
  return (x & 0x7fffu) > largest ? 0x7fff : x;
}

}  // namespace

// On each instruction set, at all lengths and misalignments; random bits, so NaNs among them, and every other time small numbers,
// with subnormal ones and zeros among them and their sums.
TEST(fused_sums_have_the_bits_of_single_steps) {
  std::mt19937 random(1);
  const cpu::TileKernels* tables[cpu::kMostTileKernels];
  const size_t num_tables = cpu::available_tile_kernels(tables);
  for (size_t t = 0; t < num_tables; ++t) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      const int d = static_cast<int>(dtype);
      const cpu::FusedSum& fused = tables[t]->fused_sum[d];
      const auto add =
          tables[t]->combine[static_cast<int>(DType::kFloat32)][static_cast<int>(ReduceOp::kSum)];
      for (size_t numel = 0; numel < 140; ++numel) {
        Guarded<uint16_t> a(numel, numel % 5), b(numel, numel % 3), out(numel, numel % 7);
        Guarded<float> x(numel), y(numel), sum(numel), wide(numel, 1);
        std::vector<uint16_t> expected(numel), last(numel);
        for (size_t i = 0; i < numel; ++i) {
          const uint32_t mask = numel % 2 == 0 ? 0xffff : 0x81ff;
          a[i] = static_cast<uint16_t>(random() & mask);
          b[i] = static_cast<uint16_t>(random() & mask);
        }
        tables[t]->widen[d](x.data(), a.data(), numel);
        tables[t]->widen[d](y.data(), b.data(), numel);
        add(sum.data(), x.data(), y.data(), numel);
        tables[t]->narrow[d](expected.data(), sum.data(), numel);
        size_t wrong = 0;
        const auto compare = [&](const uint16_t* one, const uint16_t* other) {
          for (size_t i = 0; i < numel; ++i)
            wrong += without_payload(one[i], dtype) != without_payload(other[i], dtype);
        };
        const auto compare_wide = [&](const float* one, const float* other) {
          for (size_t i = 0; i < numel; ++i)
            wrong += without_payload(one[i]) != without_payload(other[i]);
        };
        fused.both(out.data(), a.data(), b.data(), numel);
        compare(out.data(), expected.data());
        fused.start(wide.data(), a.data(), b.data(), numel);
        compare_wide(wide.data(), sum.data());
        // One more term, in two ways.
        add(x.data(), sum.data(), y.data(), numel);
        tables[t]->narrow[d](last.data(), x.data(), numel);
        fused.finish(out.data(), wide.data(), b.data(), numel);
        compare(out.data(), last.data());
        fused.add(wide.data(), wide.data(), b.data(), numel);
        compare_wide(wide.data(), x.data());
        CHECK(wrong == 0, "%s, %s, %zu elements: %zu wrong", tables[t]->instruction_set,
              name(dtype), numel, wrong);
        CHECK(out.intact() && wide.intact() && a.intact() && b.intact());
      }
    }
  }
}

TEST(averages_of_integers_are_exact_and_truncate_toward_zero) {
  for (const auto& [values, average] : std::vector<std::pair<std::vector<int64_t>, int64_t>>{
           {{INT64_MAX, INT64_MAX, INT64_MAX}, INT64_MAX},
           {{INT64_MIN, INT64_MIN}, INT64_MIN},
           {{INT64_MIN, INT64_MAX}, 0},
           {{-1, -2}, -1},
           {{-7, 0, 0}, -2},
           {{7, 0, 0}, 2}}) {
    std::vector<Operand> operands;
    for (const int64_t& value : values) operands.push_back({&value, false, 1.0});
    int64_t dst = 0;
    cpu::reduce(arguments({DType::kInt64, ReduceOp::kAvg, 0, 1, static_cast<int>(values.size())},
                          &dst, operands));
    CHECK(dst == average, "%ld, not %ld", dst, average);
  }
  const uint64_t most = UINT64_MAX;
  uint64_t dst = 0;
  const std::vector<Operand> operands = {{&most, false, 1.0}, {&most, false, 1.0}};
  cpu::reduce(arguments({DType::kUInt64, ReduceOp::kAvg, 0, 1, 2}, &dst, operands));
  CHECK(dst == most);
}

TEST(min_and_max_give_nan_whichever_operand_holds_it) {
  for (const DType dtype :
       {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3FN,
        DType::kFloat8E5M2, DType::kFloat8E4M3FNUZ, DType::kFloat8E5M2FNUZ}) {
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      for (int where = 0; where < 3; ++where) {
        const Case c{dtype, op, 3, 37, 0};
        std::vector<Array> arrays = random_operands(c, 5);
        for (size_t i = 0; i < c.numel; ++i) {
          std::byte* at = arrays[static_cast<size_t>(where)].data() + i * itemsize(dtype);
          const double nan = NAN;
          const float nan_float = NAN;
          const uint32_t code = float_format(dtype) != nullptr ? encoder(dtype).encode(NAN)
                                                               : std::bit_cast<uint32_t>(nan_float);
          std::memcpy(at, dtype == DType::kFloat64 ? static_cast<const void*>(&nan) : &code,
                      itemsize(dtype));
        }
        Array dst(c.numel * itemsize(dtype));
        const std::vector<Operand> operands = as_operands(arrays);
        cpu::reduce(arguments(c, dst.data(), operands));
        for (size_t i = 0; i < c.numel; ++i) {
          CHECK(std::isnan(load_float(dst.data() + i * itemsize(dtype), dtype)),
                "%s, NaN in operand %d, at %zu", c.text().c_str(), where, i);
        }
      }
    }
  }
}

// A result must not depend on where in the tensor an element lies, or on how the tensor is cut.
TEST(position_does_not_matter) {
  for_each_valid([&](DType dtype, ReduceOp op) {
    const Case c{dtype, op, 3, 203, op == ReduceOp::kAvg ? 3 : 0};
    const size_t size = itemsize(dtype);
    std::vector<Array> arrays = random_operands(c, 11);
    const std::vector<Operand> operands = as_operands(arrays);
    Array whole(c.numel * size), pieces(c.numel * size);
    cpu::reduce(arguments(c, whole.data(), operands));
    for (size_t begin = 0, step = 1; begin < c.numel; begin += step, step = step % 5 + 1) {
      std::vector<Operand> shifted = operands;
      for (Operand& operand : shifted)
        operand.data = static_cast<const std::byte*>(operand.data) + begin * size;
      ReduceArgs args = arguments(c, pieces.data() + begin * size, shifted);
      args.numel = std::min(step, c.numel - begin);
      cpu::reduce(args);
    }
    size_t wrong = 0;
    for (size_t i = 0; i < c.numel; ++i) {
      const Number expected = load(whole.data() + i * size, dtype);
      wrong += !holds(pieces.data() + i * size, expected, c);
    }
    CHECK(wrong == 0, "%s: %zu differ", c.text().c_str(), wrong);
  });
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
