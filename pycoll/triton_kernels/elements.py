"""Element types and operators inside Triton kernels: widening, combining in rank order, rounding once.

The meaning is that of the CUDA kernels and the CPU's (docs/kernels.md, "Types"), bit by bit where no NaN is involved.
A kernel is compiled for one pair of KIND and OP:

KIND: float (float64, float32, float16; also both parts of complex numbers where they are independent), bfloat16,
    float8_e4m3fn, float8_e5m2 (these three arrive as integers and are converted here, because Triton's own conversions
    saturate, or are missing on sm_80), integer, bool (as uint8), complex (only for product).

A sum is a pair of tensors. The second is used by two combinations only and is 0 otherwise: averages of 64-bit integers
need the exact sum (its upper 64 bits), and a product of complex numbers needs both parts at every element (the other
part).
"""

import triton
import triton.language as tl

OP_NAMES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


@triton.jit
def float_of_bfloat16(bits):
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def bfloat16_of_float(x):
    """To the nearest, ties to even; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7FFF, rounded).to(tl.uint16)


@triton.jit
def float_of_float8(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HAS_INFINITY: tl.constexpr):
    INFINITY_CODE: tl.constexpr = 0x80 - (1 << MANTISSA)
    OVERFLOW_CODE: tl.constexpr = INFINITY_CODE if HAS_INFINITY else 0x7F
    LEAST_SUBNORMAL: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)
    wide = code.to(tl.uint32)
    sign = (wide & 0x80) << 24
    magnitude = wide & 0x7F
    subnormal = (magnitude.to(tl.float32) * LEAST_SUBNORMAL).to(tl.uint32, bitcast=True)
    normal = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)
    bits = tl.where(magnitude < (1 << MANTISSA), subnormal, normal)
    special = tl.where(HAS_INFINITY & (magnitude == INFINITY_CODE), 0x7F800000, 0x7FC00000)
    bits = tl.where(magnitude >= OVERFLOW_CODE, special.to(tl.uint32), bits)
    return (bits | sign).to(tl.float32, bitcast=True)


@triton.jit
def float8_of_float(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HAS_INFINITY: tl.constexpr):
    """To the nearest, ties to even. What is beyond the range becomes infinity, or NaN where there is none."""
    INFINITY_CODE: tl.constexpr = 0x80 - (1 << MANTISSA)
    OVERFLOW_CODE: tl.constexpr = INFINITY_CODE if HAS_INFINITY else 0x7F
    # 2^23 of the least subnormal number: adding it leaves the fraction, rounded, in the low bits.
    SHIFT_EXPONENT: tl.constexpr = 24 - BIAS - MANTISSA
    SHIFT: tl.constexpr = 2.0**SHIFT_EXPONENT
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    shifted = magnitude.to(tl.float32, bitcast=True) + SHIFT
    subnormal = shifted.to(tl.uint32, bitcast=True) - ((127 + SHIFT_EXPONENT) << 23)
    odd = (magnitude >> (23 - MANTISSA)) & 1
    rebiased = magnitude - ((127 - BIAS) << 23)
    normal = (rebiased + ((1 << (22 - MANTISSA)) - 1) + odd) >> (23 - MANTISSA)
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    code = tl.where(code > OVERFLOW_CODE, OVERFLOW_CODE, code)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (sign | code.to(tl.uint32)).to(tl.uint8)


@triton.jit
def to_float(x, KIND: tl.constexpr):
    """Floats of at most 32 bits in float32; float64 as it is."""
    if KIND == "bfloat16":
        return float_of_bfloat16(x)
    elif KIND == "float8_e4m3fn":
        return float_of_float8(x, 3, 7, False)
    elif KIND == "float8_e5m2":
        return float_of_float8(x, 2, 15, True)
    elif x.dtype == tl.float16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def from_float(x, STORAGE: tl.constexpr, KIND: tl.constexpr):
    """The opposite of to_float, rounded to nearest even."""
    if KIND == "bfloat16":
        return bfloat16_of_float(x)
    elif KIND == "float8_e4m3fn":
        return float8_of_float(x, 3, 7, False)
    elif KIND == "float8_e5m2":
        return float8_of_float(x, 2, 15, True)
    else:
        return x.to(STORAGE)


# ---- the terms of a reduction


@triton.jit
def widen(x, KIND: tl.constexpr, OP: tl.constexpr):
    """The element in the type in which it is combined."""
    if KIND == "bool":
        return (x != 0).to(tl.uint8)
    elif KIND == "integer":
        if OP == "avg":
            if x.dtype.primitive_bitwidth <= 16:
                return x.to(tl.int32)
            elif x.dtype.primitive_bitwidth == 32:
                return x.to(tl.int64)
            else:
                return x.to(tl.uint64, bitcast=True)
        else:
            return x
    else:
        return to_float(x, KIND)


@triton.jit
def upper_half(x, KIND: tl.constexpr, OP: tl.constexpr):
    """Of a 64-bit integer in 128 bits; 0 where there is none."""
    if KIND == "integer" and OP == "avg" and x.dtype == tl.int64:
        return x >> 63
    elif KIND == "integer" and OP == "avg" and x.dtype == tl.uint64:
        return (x & 0).to(tl.int64)
    else:
        return 0


@triton.jit
def scaled(x, factor, OP: tl.constexpr):
    """PREMUL_SUM: times the rank's factor, a float64, in the type of x."""
    if OP == "premul_sum":
        return x * factor.to(x.dtype)
    else:
        return x


@triton.jit
def load_term(pointer, offsets, mask, factor, KIND: tl.constexpr, OP: tl.constexpr):
    """Elements of one rank as a pair (this file's docstring), with its factor."""
    stored = tl.load(pointer + offsets, mask=mask)
    first = scaled(widen(stored, KIND, OP), factor, OP)
    if KIND == "complex":
        second = to_float(tl.load(pointer + (offsets ^ 1), mask=mask), KIND)
    else:
        second = upper_half(stored, KIND, OP)
    return first, second


@triton.jit
def combine(a, a2, b, b2, offsets, KIND: tl.constexpr, OP: tl.constexpr):
    """(a, a2) op (b, b2). NaN wins in min and max; integers wrap."""
    if KIND == "bool":
        if OP == "sum" or OP == "max" or OP == "bor":
            return a | b, a2
        elif OP == "bxor":
            return a ^ b, a2
        else:
            return a & b, a2
    elif KIND == "complex":
        same = a * b
        other = a2 * b2
        cross = a * b2 + a2 * b
        is_imaginary = (offsets & 1) == 1
        return tl.where(is_imaginary, cross, same - other), tl.where(
            is_imaginary, other - same, cross
        )
    elif OP == "product":
        return a * b, a2
    elif OP == "min":
        return tl.where((b < a) | (b != b), b, a), a2
    elif OP == "max":
        return tl.where((b > a) | (b != b), b, a), a2
    elif OP == "band":
        return a & b, a2
    elif OP == "bor":
        return a | b, a2
    elif OP == "bxor":
        return a ^ b, a2
    elif KIND == "integer" and OP == "avg" and a.dtype == tl.uint64:
        low = a + b
        return low, a2 + b2 + (low < b).to(tl.int64)
    else:
        return a + b, a2


@triton.jit
def quotient_of_128_bits(low, high, divisor):
    """(high, low) / divisor toward zero, where it fits 64 bits: long division by 32-bit digits."""
    is_negative = high < 0
    d = divisor.to(tl.uint64)
    h = tl.where(is_negative, (high ^ -1) + (low == 0).to(tl.int64), high)
    h = h.to(tl.uint64, bitcast=True)
    m = tl.where(is_negative, (low ^ 0xFFFFFFFFFFFFFFFF) + 1, low)
    rest = h - h // d * d
    upper = (rest << 32) | (m >> 32)
    digit = upper // d
    rest = upper - digit * d
    lower = (rest << 32) | (m & 0xFFFFFFFF)
    quotient = (digit << 32) | (lower // d)
    return tl.where(is_negative, (quotient ^ 0xFFFFFFFFFFFFFFFF) + 1, quotient)


@triton.jit
def finished(a, a2, divisor, KIND: tl.constexpr, OP: tl.constexpr):
    """The result of a reduction: AVG divides."""
    if OP == "avg":
        if a.dtype == tl.uint64:
            return quotient_of_128_bits(a, a2, divisor)
        elif a.dtype == tl.float32:
            return tl.div_rn(a, divisor.to(tl.float32))
        else:
            if a.dtype == tl.float64:
                return a / divisor.to(tl.float64)
            else:
                return a // divisor.to(a.dtype)
    else:
        return a


@triton.jit
def narrow(a, STORAGE: tl.constexpr, KIND: tl.constexpr):
    """A result as it is stored, rounded to nearest even."""
    if KIND == "integer" or KIND == "bool":
        return a.to(STORAGE)
    else:
        return from_float(a, STORAGE, KIND)
