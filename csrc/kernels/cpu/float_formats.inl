// Floats of 16 and 8 bits to and from float32, one element at a time, in a form that the compiler vectorises. Included once per
// instruction set, before the .inl files that use it; the rules of tile_kernels.inl hold.

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
  return x != x ? 0x7fc0 : static_cast<u16>(rounded);
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

// ---- 8-bit floats. kFinite: no infinities, one NaN pattern (FN); kUnsignedZero: 0x80 is the NaN, and zero has no sign (FNUZ).

template <int kMantissa, int kBias, bool kFinite, bool kUnsignedZero>
struct Float8 {
  static constexpr int kExponentMask = (1 << (7 - kMantissa)) - 1;
  static constexpr int kFractionMask = (1 << kMantissa) - 1;

  // Without branches: this is what a vector body needs.
  static float to_float(u8 x) {
    const u32 sign = u32{x & 0x80u} << 24;
    const u32 exponent = (u32{x} >> kMantissa) & kExponentMask;
    const u32 fraction = x & kFractionMask;
    // 2^(1 - bias - mantissa): what the fraction of a subnormal number counts.
    const float unit = float_of(static_cast<u32>(127 + 1 - kBias - kMantissa) << 23);
    const u32 subnormal = bits_of(static_cast<float>(static_cast<i32>(fraction)) * unit);
    const u32 normal = (exponent + (127 - kBias)) << 23 | fraction << (23 - kMantissa);
    const u32 special = fraction != 0 ? 0x7fc00000u : 0x7f800000u;
    u32 magnitude = exponent == 0 ? subnormal : normal;
    if (kUnsignedZero) {
      return float_of(x == 0x80 ? 0x7fc00000u : magnitude | sign);
    } else if (kFinite) {
      magnitude = (x & 0x7f) == 0x7f ? 0x7fc00000u : magnitude;
    } else {
      magnitude = exponent == kExponentMask ? special : magnitude;
    }
    return float_of(magnitude | sign);
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

  // A number that is too large becomes the largest one. Of the formats with a signed zero.
  static u8 from_float_saturating(float x) {
    static_assert(!kUnsignedZero);
    const u32 bits = bits_of(x);
    const u32 magnitude = bits & 0x7fffffff;
    const u32 largest_code = kFinite ? 0x7e : (0x7c - 1);
    const u32 largest = ((largest_code >> kMantissa) + 127 - kBias) << 23 |
                        (largest_code & kFractionMask) << (23 - kMantissa);
    const u32 number = magnitude < largest ? magnitude : largest;
    // Both as in from_float.
    const float shift = float_of(static_cast<u32>(127 + 1 - kBias - kMantissa + 23) << 23);
    const u32 subnormal = bits_of(float_of(number) + shift) - bits_of(shift);
    const u32 half = (1u << (22 - kMantissa)) - 1 + ((number >> (23 - kMantissa)) & 1);
    const u32 normal = (number - (static_cast<u32>(127 - kBias) << 23) + half) >> (23 - kMantissa);
    u32 code = number < (static_cast<u32>(127 + 1 - kBias) << 23) ? subnormal : normal;
    code = magnitude == 0x7f800000 && !kFinite ? 0x7c : code;
    code = magnitude > 0x7f800000 || (magnitude == 0x7f800000 && kFinite) ? 0x7f : code;
    return static_cast<u8>((bits >> 24 & 0x80) | code);
  }
};

using E4M3FN = Float8<3, 7, true, false>;
using E5M2 = Float8<2, 15, false, false>;
using E4M3FNUZ = Float8<3, 8, true, true>;
using E5M2FNUZ = Float8<2, 16, true, true>;

}  // namespace
