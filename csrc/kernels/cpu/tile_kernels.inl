// Included once per instruction set, inside a namespace of its own and under that set's target pragma. Only plain loops that
// the compiler vectorises, and conversions of 16-bit floats by intrinsics where the set has them. No inline function of a
// header may be called here: the linker could pick this copy for code that runs on lesser CPUs.

#include "kernels/cpu/float_formats.inl"
#include "kernels/cpu/quantise_tiles.inl"

namespace {

template <class T>
struct Complex {
  T re, im;
};

// ---- 16-bit floats

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

// ---- sums of 16-bit floats in one pass

struct BFloat16 {
  static float widen(u16 x) { return bf16_to_float(x); }
  static u16 narrow(float x) { return float_to_bf16(x); }
};
struct Float16 {
  static float widen(u16 x) { return f16_to_float(x); }
  static u16 narrow(float x) { return float_to_f16(x); }
};

template <class T>
float load_wide(const u16* p, std_size i) {
  return T::widen(p[i]);
}
template <class T>
float load_wide(const float* p, std_size i) {
  return p[i];
}
template <class T>
void store_as(u16* p, std_size i, float x) {
  p[i] = T::narrow(x);
}
template <class T>
void store_as(float* p, std_size i, float x) {
  p[i] = x;
}

#ifdef PYCOLL_ISA_HAS_F16C
inline __m256 load_8(const u16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256 load_8(const float* p) { return _mm256_loadu_ps(p); }
inline void store_8(u16* p, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_8(float* p, __m256 x) { _mm256_storeu_ps(p, x); }
#endif

template <class T>
struct IsFloat16 {
  static constexpr bool value = false;
};
template <>
struct IsFloat16<Float16> {
  static constexpr bool value = true;
};

// Out and A are u16 (elements of T) or float; dst may be a or b.
template <class T, class Out, class A>
void fused_sum(void* dst, const void* a, const void* b, std_size numel) {
  auto* out = static_cast<Out*>(dst);
  auto* x = static_cast<const A*>(a);
  auto* y = static_cast<const u16*>(b);
  std_size i = 0;
#ifdef PYCOLL_ISA_HAS_F16C
  if (IsFloat16<T>::value) {
    for (; i + 8 <= numel; i += 8) store_8(out + i, _mm256_add_ps(load_8(x + i), load_8(y + i)));
  }
#endif
#pragma GCC ivdep
  for (std_size j = i; j < numel; ++j) {
    store_as<T>(out, j, load_wide<T>(x, j) + load_wide<T>(y, j));
  }
}

// Two bfloat16 are one word: the upper one is a float32 whose lower half is zero, the lower one is that after a shift. So nothing has
// to be moved from lane to lane.
typedef u32 WordOf16 __attribute__((aligned(2), may_alias));

// In the upper half of the word; the lower half is of no use.
inline u32 round_to_upper(float x) {
  const u32 bits = bits_of(x);
  const u32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return x != x ? 0x7fc00000 : rounded;
}

void add_bf16(void* dst, const void* a, const void* b, std_size numel) {
  // Not `auto*`, which would forget the type's attributes.
  WordOf16* const out = static_cast<WordOf16*>(dst);
  const WordOf16* const x = static_cast<const WordOf16*>(a);
  const WordOf16* const y = static_cast<const WordOf16*>(b);
#pragma GCC ivdep
  for (std_size i = 0; i < numel / 2; ++i) {
    const u32 lower = round_to_upper(float_of(x[i] << 16) + float_of(y[i] << 16));
    const u32 upper = round_to_upper(float_of(x[i] & 0xffff0000) + float_of(y[i] & 0xffff0000));
    out[i] = lower >> 16 | (upper & 0xffff0000);
  }
  if (numel % 2 == 1) {
    const std_size last = numel - 1;
    fused_sum<BFloat16, u16, u16>(static_cast<u16*>(dst) + last, static_cast<const u16*>(a) + last,
                                  static_cast<const u16*>(b) + last, 1);
  }
}

template <class T>
FusedSum make_fused_sum() {
  return {fused_sum<T, u16, u16>, fused_sum<T, float, u16>, fused_sum<T, float, float>,
          fused_sum<T, u16, float>};
}

// complex32 is two float16.
void widen_complex32(void* dst, const void* src, std_size numel) { widen_f16(dst, src, 2 * numel); }
void narrow_complex32(void* dst, const void* src, std_size numel) {
  narrow_f16(dst, src, 2 * numel);
}

// ---- 8-bit floats

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
  table.fused_sum[at(DType::kFloat16)] = make_fused_sum<Float16>();
  table.fused_sum[at(DType::kBFloat16)] = make_fused_sum<BFloat16>();
  table.fused_sum[at(DType::kBFloat16)].both = add_bf16;
  fill_float8<E4M3FN>(&table, DType::kFloat8E4M3FN);
  fill_float8<E5M2>(&table, DType::kFloat8E5M2);
  fill_float8<E4M3FNUZ>(&table, DType::kFloat8E4M3FNUZ);
  fill_float8<E5M2FNUZ>(&table, DType::kFloat8E5M2FNUZ);
  fill_quantisation(&table);
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
