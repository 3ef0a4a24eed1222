// Included once per instruction set, inside a namespace of its own and under that set's target pragma. Only plain loops that
// the compiler vectorises, and conversions of 16-bit floats by intrinsics where the set has them. No inline function of a
// header may be called here: the linker could pick this copy for code that runs on lesser CPUs.

namespace {

using std_size = decltype(sizeof(0));
using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long;
using u64 = unsigned long;
using i128 = __int128;
using u128 = unsigned __int128;
static_assert(sizeof(i64) == 8 && sizeof(i32) == 4 && sizeof(i16) == 2);

template <class T>
struct Complex {
  T re, im;
};

inline u32 bits_of(float x) {
  u32 bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(u32 bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// ---- 16-bit floats

inline float bf16_to_float(u16 x) { return float_of(u32{x} << 16); }

inline u16 float_to_bf16(float x) {
  const u32 bits = bits_of(x);
  const u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : static_cast<u16>(rounded);
}

inline float f16_to_float(u16 x) {
  const u32 sign = u32{x & 0x8000u} << 16;
  const u32 magnitude = x & 0x7fffu;
  // Normal numbers: move the fields and re-bias. Subnormal ones: the fraction counts units of 2^-24.
  const float normal = float_of((magnitude << 13) + (112u << 23));
  // The hardware's conversion makes a signalling NaN quiet.
  const u32 quiet = magnitude > 0x7c00 ? 0x400000u : 0u;
  const float special = float_of(((magnitude << 13) + (224u << 23)) | quiet);
  const float subnormal = static_cast<float>(static_cast<i32>(magnitude)) * 0x1p-24f;
  const float value = magnitude >= 0x7c00 ? special : magnitude >= 0x0400 ? normal : subnormal;
  return float_of(bits_of(value) | sign);
}

inline u16 float_to_f16(float x) {
  const u32 bits = bits_of(x);
  const u32 sign = (bits >> 16) & 0x8000;
  const u32 magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<u16>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  if (magnitude >= 0x47800000) return static_cast<u16>(sign | 0x7c00);
  if (magnitude < 0x38800000) {
    // Adding 0.5 leaves the subnormal's fraction, rounded to nearest even, in the low bits.
    return static_cast<u16>(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  }
  const u32 rounded = magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<u16>(sign | (rounded >> 13));
}

void widen_bf16(void* dst, const void* src, std_size numel) {
  auto* out = static_cast<float*>(dst);
  auto* in = static_cast<const u16*>(src);
  for (std_size i = 0; i < numel; ++i) out[i] = bf16_to_float(in[i]);
}

void narrow_bf16(void* dst, const void* src, std_size numel) {
  auto* out = static_cast<u16*>(dst);
  auto* in = static_cast<const float*>(src);
  for (std_size i = 0; i < numel; ++i) out[i] = float_to_bf16(in[i]);
}

void widen_f16(void* dst, const void* src, std_size numel) {
  auto* out = static_cast<float*>(dst);
  auto* in = static_cast<const u16*>(src);
  std_size i = 0;
#ifdef PYCOLL_ISA_HAS_F16C
  for (; i + 8 <= numel; i += 8) {
    _mm256_storeu_ps(out + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
#endif
  for (; i < numel; ++i) out[i] = f16_to_float(in[i]);
}

void narrow_f16(void* dst, const void* src, std_size numel) {
  auto* out = static_cast<u16*>(dst);
  auto* in = static_cast<const float*>(src);
  std_size i = 0;
#ifdef PYCOLL_ISA_HAS_F16C
  for (; i + 8 <= numel; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < numel; ++i) out[i] = float_to_f16(in[i]);
}

// complex32 is two float16.
void widen_complex32(void* dst, const void* src, std_size numel) { widen_f16(dst, src, 2 * numel); }
void narrow_complex32(void* dst, const void* src, std_size numel) {
  narrow_f16(dst, src, 2 * numel);
}

// ---- 8-bit floats. kFinite: no infinities, one NaN pattern (FN); kUnsignedZero: 0x80 is the NaN, and zero has no sign (FNUZ).

template <int kMantissa, int kBias, bool kFinite, bool kUnsignedZero>
struct Float8 {
  static constexpr int kExponentMask = (1 << (7 - kMantissa)) - 1;
  static constexpr int kFractionMask = (1 << kMantissa) - 1;

  static float to_float(u8 x) {
    const u32 sign = u32{x & 0x80u} << 24;
    const i32 exponent = (x >> kMantissa) & kExponentMask;
    const i32 fraction = x & kFractionMask;
    const float nan = float_of(0x7fc00000u);
    if (kUnsignedZero && x == 0x80) return nan;
    if (!kUnsignedZero && kFinite && (x & 0x7f) == 0x7f) return float_of(bits_of(nan) | sign);
    if (!kFinite && exponent == kExponentMask) {
      return float_of(sign | 0x7f800000u | (fraction != 0 ? 0x400000u : 0u));
    }
    // 2^-100 * 2^(100 + 1 - bias - mantissa): both factors are normal floats for every format.
    const float unit = float_of(static_cast<u32>(127 + 1 - kBias - kMantissa) << 23);
    const float value = exponent == 0 ? static_cast<float>(fraction) * unit
                                      : float_of((static_cast<u32>(exponent - kBias + 127) << 23) |
                                                 (static_cast<u32>(fraction) << (23 - kMantissa)));
    return float_of(bits_of(value) | sign);
  }

  static u8 from_float(float x) {
    const u32 bits = bits_of(x);
    const u8 sign = static_cast<u8>((bits >> 24) & 0x80);
    const u32 magnitude = bits & 0x7fffffff;
    const u8 nan = kUnsignedZero ? 0x80 : kFinite ? (sign | 0x7f) : (sign | 0x7c | 0x03);
    if (magnitude > 0x7f800000) return nan;
    // The largest code that is a number.
    const u32 largest = kUnsignedZero ? 0x7f : kFinite ? 0x7e : (0x7c - 1);
    const u8 overflow = kUnsignedZero ? 0x80 : kFinite ? (sign | 0x7f) : (sign | 0x7c);
    u32 code;
    const u32 least_normal = static_cast<u32>(127 + 1 - kBias) << 23;
    if (magnitude < least_normal) {
      // Adding 2^(1 - bias - mantissa + 23) leaves the fraction, rounded to nearest even, in the low bits.
      const float shift = float_of(static_cast<u32>(127 + 1 - kBias - kMantissa + 23) << 23);
      code = bits_of(float_of(magnitude) + shift) - bits_of(shift);
    } else {
      const u32 half = (1u << (22 - kMantissa)) - 1 + ((magnitude >> (23 - kMantissa)) & 1);
      const u32 rebiased = magnitude - (static_cast<u32>(127 - kBias) << 23);
      code = (rebiased + half) >> (23 - kMantissa);
    }
    if (code > largest) return overflow;
    if (kUnsignedZero && code == 0) return 0;
    return static_cast<u8>(sign | code);
  }
};

using E4M3FN = Float8<3, 7, true, false>;
using E5M2 = Float8<2, 15, false, false>;
using E4M3FNUZ = Float8<3, 8, true, true>;
using E5M2FNUZ = Float8<2, 16, true, true>;

template <class Format>
void widen_f8(void* dst, const void* src, std_size numel) {
  auto* out = static_cast<float*>(dst);
  auto* in = static_cast<const u8*>(src);
  for (std_size i = 0; i < numel; ++i) out[i] = Format::to_float(in[i]);
}

template <class Format>
void narrow_f8(void* dst, const void* src, std_size numel) {
  auto* out = static_cast<u8*>(dst);
  auto* in = static_cast<const float*>(src);
  for (std_size i = 0; i < numel; ++i) out[i] = Format::from_float(in[i]);
}

// ---- integers (for AVG) and bool (whose stored byte may be any non-zero value)

template <class To, class From>
void convert(void* dst, const void* src, std_size numel) {
  auto* out = static_cast<To*>(dst);
  auto* in = static_cast<const From*>(src);
  for (std_size i = 0; i < numel; ++i) out[i] = static_cast<To>(in[i]);
}

void normalise_bool(void* dst, const void* src, std_size numel) {
  auto* out = static_cast<u8*>(dst);
  auto* in = static_cast<const u8*>(src);
  for (std_size i = 0; i < numel; ++i) out[i] = in[i] != 0;
}

// ---- combining

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return a + b;
  }
  template <class T>
  static Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {a.re + b.re, a.im + b.im};
  }
};
struct Product {
  template <class T>
  static T apply(T a, T b) {
    return a * b;
  }
  // Promoted to int, the product of two 16-bit numbers could overflow.
  static u16 apply(u16 a, u16 b) { return static_cast<u16>(u32{a} * u32{b}); }
};
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};
struct Band {
  template <class T>
  static T apply(T a, T b) {
    return a & b;
  }
};
struct Bor {
  template <class T>
  static T apply(T a, T b) {
    return a | b;
  }
};
struct Bxor {
  template <class T>
  static T apply(T a, T b) {
    return a ^ b;
  }
};

template <class T, class Op>
void combine(void* dst, const void* a, const void* b, std_size numel) {
  auto* out = static_cast<T*>(dst);
  auto* x = static_cast<const T*>(a);
  auto* y = static_cast<const T*>(b);
  // dst may be a or b, index for index, which does not hinder vectorising.
#pragma GCC ivdep
  for (std_size i = 0; i < numel; ++i) out[i] = static_cast<T>(Op::apply(x[i], y[i]));
}

// GCC 12 makes a fused multiply-add of this loop (vfmaddsub) in spite of -ffp-contract=off, unless it is not vectorised.
#if defined(__GNUC__) && !defined(__clang__)
#define PYCOLL_NOT_VECTORISED __attribute__((optimize("no-tree-vectorize")))
#else
#define PYCOLL_NOT_VECTORISED
#endif
template <class T>
PYCOLL_NOT_VECTORISED void multiply_complex(void* dst, const void* a, const void* b,
                                            std_size numel) {
  auto* out = static_cast<Complex<T>*>(dst);
  auto* x = static_cast<const Complex<T>*>(a);
  auto* y = static_cast<const Complex<T>*>(b);
  for (std_size i = 0; i < numel; ++i) {
    const T re = x[i].re * y[i].re - x[i].im * y[i].im;
    const T im = x[i].re * y[i].im + x[i].im * y[i].re;
    out[i] = {re, im};
  }
}
#undef PYCOLL_NOT_VECTORISED

template <class T>
void scale(void* data, double factor, std_size numel) {
  auto* x = static_cast<T*>(data);
  const T f = static_cast<T>(factor);
  for (std_size i = 0; i < numel; ++i) x[i] *= f;
}
template <class T>
void scale_complex(void* data, double factor, std_size numel) {
  scale<T>(data, factor, 2 * numel);
}

template <class T>
void divide(void* data, int divisor, std_size numel) {
  auto* x = static_cast<T*>(data);
  const T d = static_cast<T>(divisor);
  for (std_size i = 0; i < numel; ++i) x[i] /= d;
}
template <class T>
void divide_complex(void* data, int divisor, std_size numel) {
  divide<T>(data, divisor, 2 * numel);
}

// ---- the table

constexpr int at(DType dtype) { return static_cast<int>(dtype); }
constexpr int at(ReduceOp op) { return static_cast<int>(op); }

template <class T>
void fill_ordered(CombineFn* row) {
  row[at(ReduceOp::kSum)] = row[at(ReduceOp::kAvg)] = combine<T, Sum>;
  row[at(ReduceOp::kProduct)] = combine<T, Product>;
  row[at(ReduceOp::kMin)] = combine<T, Min>;
  row[at(ReduceOp::kMax)] = combine<T, Max>;
}

template <class T>
void fill_float(TileKernels* table, DType dtype) {
  fill_ordered<T>(table->combine[at(dtype)]);
  table->combine[at(dtype)][at(ReduceOp::kPremulSum)] = combine<T, Sum>;
  table->scale[at(dtype)] = scale<T>;
  table->divide[at(dtype)] = divide<T>;
}

// Overflow wraps, so the arithmetic is unsigned; order and division need the sign.
template <class Signed, class Unsigned>
void fill_integer(TileKernels* table, DType dtype, bool is_signed) {
  CombineFn* row = table->combine[at(dtype)];
  row[at(ReduceOp::kSum)] = combine<Unsigned, Sum>;
  row[at(ReduceOp::kProduct)] = combine<Unsigned, Product>;
  row[at(ReduceOp::kMin)] = is_signed ? combine<Signed, Min> : combine<Unsigned, Min>;
  row[at(ReduceOp::kMax)] = is_signed ? combine<Signed, Max> : combine<Unsigned, Max>;
  row[at(ReduceOp::kBand)] = combine<Unsigned, Band>;
  row[at(ReduceOp::kBor)] = combine<Unsigned, Bor>;
  row[at(ReduceOp::kBxor)] = combine<Unsigned, Bxor>;
}

template <class T>
void fill_average(TileKernels* table, DType dtype) {
  table->combine[at(dtype)][at(ReduceOp::kAvg)] = combine<T, Sum>;
  table->divide[at(dtype)] = divide<T>;
}

template <class Format>
void fill_float8(TileKernels* table, DType dtype) {
  table->widen[at(dtype)] = widen_f8<Format>;
  table->narrow[at(dtype)] = narrow_f8<Format>;
}

template <class T, class Wide>
void fill_average_conversion(TileKernels* table, DType dtype) {
  table->widen[at(dtype)] = convert<Wide, T>;
  table->narrow[at(dtype)] = convert<T, Wide>;
}

template <class T>
void fill_complex(TileKernels* table, DType dtype) {
  CombineFn* row = table->combine[at(dtype)];
  row[at(ReduceOp::kSum)] = row[at(ReduceOp::kAvg)] = row[at(ReduceOp::kPremulSum)] =
      combine<Complex<T>, Sum>;
  row[at(ReduceOp::kProduct)] = multiply_complex<T>;
  table->scale[at(dtype)] = scale_complex<T>;
  table->divide[at(dtype)] = divide_complex<T>;
}

void fill_bool(TileKernels* table) {
  CombineFn* row = table->combine[at(DType::kBool)];
  row[at(ReduceOp::kSum)] = row[at(ReduceOp::kMax)] = row[at(ReduceOp::kBor)] = combine<u8, Bor>;
  row[at(ReduceOp::kProduct)] = row[at(ReduceOp::kMin)] = row[at(ReduceOp::kBand)] =
      combine<u8, Band>;
  row[at(ReduceOp::kBxor)] = combine<u8, Bxor>;
  table->widen[at(DType::kBool)] = normalise_bool;
  table->narrow[at(DType::kBool)] = normalise_bool;
}

TileKernels make_table(const char* instruction_set) {
  TileKernels table{};
  table.instruction_set = instruction_set;
  fill_float<double>(&table, DType::kFloat64);
  fill_float<float>(&table, DType::kFloat32);
  table.widen[at(DType::kFloat16)] = widen_f16;
  table.narrow[at(DType::kFloat16)] = narrow_f16;
  table.widen[at(DType::kBFloat16)] = widen_bf16;
  table.narrow[at(DType::kBFloat16)] = narrow_bf16;
  fill_float8<E4M3FN>(&table, DType::kFloat8E4M3FN);
  fill_float8<E5M2>(&table, DType::kFloat8E5M2);
  fill_float8<E4M3FNUZ>(&table, DType::kFloat8E4M3FNUZ);
  fill_float8<E5M2FNUZ>(&table, DType::kFloat8E5M2FNUZ);
  fill_integer<i8, u8>(&table, DType::kInt8, true);
  fill_integer<i16, u16>(&table, DType::kInt16, true);
  fill_integer<i32, u32>(&table, DType::kInt32, true);
  fill_integer<i64, u64>(&table, DType::kInt64, true);
  fill_integer<i8, u8>(&table, DType::kUInt8, false);
  fill_integer<i16, u16>(&table, DType::kUInt16, false);
  fill_integer<i32, u32>(&table, DType::kUInt32, false);
  fill_integer<i64, u64>(&table, DType::kUInt64, false);
  fill_average<i128>(&table, DType::kInt128);
  fill_average<u128>(&table, DType::kUInt128);
  fill_average_conversion<i8, i128>(&table, DType::kInt8);
  fill_average_conversion<i16, i128>(&table, DType::kInt16);
  fill_average_conversion<i32, i128>(&table, DType::kInt32);
  fill_average_conversion<i64, i128>(&table, DType::kInt64);
  fill_average_conversion<u8, u128>(&table, DType::kUInt8);
  fill_average_conversion<u16, u128>(&table, DType::kUInt16);
  fill_average_conversion<u32, u128>(&table, DType::kUInt32);
  fill_average_conversion<u64, u128>(&table, DType::kUInt64);
  fill_bool(&table);
  table.widen[at(DType::kComplex32)] = widen_complex32;
  table.narrow[at(DType::kComplex32)] = narrow_complex32;
  fill_complex<float>(&table, DType::kComplex64);
  fill_complex<double>(&table, DType::kComplex128);
  return table;
}

}  // namespace
