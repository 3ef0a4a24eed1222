"""Block-wise quantisation (docs/quantisation.md has the rule, and the bound of the error): what
``pycoll.ops.quantise_blocks`` and ``dequantise_blocks`` mean, to the bit.

A program takes ROWS blocks of elements, WIDTH elements of each at a time: first the largest magnitudes, then the
codes. UNIT: what the sizes of blocks and data are multiples of, so that masks leave vectors whole.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pycoll.triton_kernels.elements import float8_of_float, from_float, to_float
from pycoll.triton_kernels.launching import LaunchConfig, launch
from pycoll.triton_kernels.storage import UNIT_BYTES, check_contiguous, storage_of

CODES = {
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.int8: "int8",
}
DATA = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
# Elements that a program handles at once.
TILE_NUMEL = 4096
VECTOR_NUMEL = 16  # codes in 16 bytes


@triton.jit
def largest_code(CODE: tl.constexpr):
    if CODE == "float8_e4m3fn":
        return 448.0
    elif CODE == "float8_e5m2":
        return 57344.0
    else:
        return 127.0


@triton.jit
def block_scale(amax_bits, CODE: tl.constexpr):
    """What makes the largest magnitude the largest code, rounded toward zero and normal; NaN if it is not finite."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    largest = tl.zeros_like(amax) + largest_code(CODE)
    quotient = tl.div_rn(amax, largest)
    # Exact in float64, so that a quotient that was rounded up shows.
    is_above = quotient.to(tl.float64) * largest.to(tl.float64) > amax.to(tl.float64)
    bits = quotient.to(tl.int32, bitcast=True) - is_above.to(tl.int32)
    bits = tl.where(bits < 0x00800000, 0x00800000, bits)
    return tl.where(amax_bits >= 0x7F800000, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def code_of(x, scale, CODE: tl.constexpr):
    """x / scale, to the nearest code, ties to even; 0 under a scale that is NaN."""
    ratio = tl.where(scale == scale, tl.div_rn(x, scale), 0.0)
    if CODE == "float8_e4m3fn":
        return float8_of_float(ratio, 3, 7, False)
    elif CODE == "float8_e5m2":
        return float8_of_float(ratio, 2, 15, True)
    else:
        # Adding 1.5 * 2^23 leaves no room for a fraction.
        return ((ratio + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def rows_of(block_units, numel, num_scales, ROWS: tl.constexpr, UNIT: tl.constexpr):
    """Of this program: block numbers, first elements, and the ends of their data in units."""
    rows = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    begin = rows * block_units * UNIT
    end = tl.minimum(begin + block_units * UNIT, numel)
    return rows, begin, tl.where(rows < num_scales, end // UNIT, 0)


@triton.jit
def tile_of(begin, end_units, column, block_units, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    """Elements of all rows from `column` on, and which of them are there."""
    columns = column + tl.arange(0, WIDTH)
    offsets = begin[:, None] + columns[None, :]
    inside = columns // UNIT < block_units
    return offsets, (offsets // UNIT < end_units[:, None]) & inside[None, :]


@triton.jit(do_not_specialize=["numel", "block_units", "num_scales"])
def quantise_kernel(
    data,
    codes,
    scales,
    numel,
    block_units,
    num_scales,
    KIND: tl.constexpr,
    CODE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
):
    numel = tl.cast(numel, tl.int64)
    block_units = tl.cast(block_units, tl.int64)
    rows, begin, end_units = rows_of(block_units, numel, num_scales, ROWS, UNIT)
    amax = tl.zeros((ROWS,), tl.int32)
    for column in range(0, block_units * UNIT, WIDTH):
        offsets, mask = tile_of(begin, end_units, column, block_units, WIDTH, UNIT)
        x = to_float(tl.load(data + offsets, mask=mask, other=0), KIND)
        bits = (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.int32)
        amax = tl.maximum(amax, tl.max(bits, axis=1))
    scale = block_scale(amax, CODE)
    tl.store(scales + rows, scale, mask=rows < num_scales)
    for column in range(0, block_units * UNIT, WIDTH):
        offsets, mask = tile_of(begin, end_units, column, block_units, WIDTH, UNIT)
        x = to_float(tl.load(data + offsets, mask=mask, other=0), KIND)
        tl.store(codes + offsets, code_of(x, scale[:, None], CODE), mask=mask)


@triton.jit(do_not_specialize=["numel", "block_units", "num_scales"])
def dequantise_kernel(
    data,
    codes,
    scales,
    numel,
    block_units,
    num_scales,
    KIND: tl.constexpr,
    CODE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
):
    numel = tl.cast(numel, tl.int64)
    block_units = tl.cast(block_units, tl.int64)
    rows, begin, end_units = rows_of(block_units, numel, num_scales, ROWS, UNIT)
    scale = tl.load(scales + rows, mask=rows < num_scales, other=0.0)
    for column in range(0, block_units * UNIT, WIDTH):
        offsets, mask = tile_of(begin, end_units, column, block_units, WIDTH, UNIT)
        code = tl.load(codes + offsets, mask=mask, other=0)
        if CODE == "int8":
            x = code.to(tl.float32)
        else:
            x = to_float(code, CODE)
        result = from_float(x * scale[:, None], data.dtype.element_ty, KIND)
        tl.store(data + offsets, result, mask=mask)


# ---- launchers


def quantise_blocks(
    tensor: Tensor,
    block: int = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits, with one float32 scale for each `block` elements.

    Args:
        tensor: float32, float16, bfloat16 or float8; contiguous.
        block: elements that share a scale; the last block may be shorter.
        dtype: of the codes: float8_e4m3fn, float8_e5m2 or int8.
        codes, scales: where they go; None: new tensors.

    Raises:
        ValueError: a dtype, a size or `block` does not fit.
    """
    if dtype not in CODES:
        raise ValueError(f"dtype is {dtype}; give float8_e4m3fn, float8_e5m2 or int8")
    num_blocks = -(-tensor.numel() // max(block, 1))
    if codes is None:
        codes = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    if scales is None:
        scales = torch.empty(num_blocks, dtype=torch.float32, device=tensor.device)
    _check(tensor, codes, scales, block)
    _start(quantise_kernel, tensor, codes, scales, block, config)
    return codes, scales


def dequantise_blocks(
    codes: Tensor,
    scales: Tensor,
    block: int = 128,
    dtype: torch.dtype = torch.float32,
    *,
    output: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> Tensor:
    """Codes times the scale of their block.

    Args:
        codes, scales, block: as :func:`quantise_blocks` gave and got them.
        dtype: of the result; the product is formed in float32.
        output: where it goes; None: a new tensor.

    Raises:
        ValueError: a dtype or a size does not fit.
    """
    if output is None:
        output = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    _check(output, codes, scales, block)
    _start(dequantise_kernel, output, codes, scales, block, config)
    return output


def _check(data: Tensor, codes: Tensor, scales: Tensor, block: int) -> None:
    if block < 1:
        raise ValueError(f"block is {block}; give a positive number of elements")
    check_contiguous({"tensor": data, "codes": codes, "scales": scales}, data.device)
    if data.dtype not in DATA or codes.dtype not in CODES or scales.dtype != torch.float32:
        raise ValueError(
            f"tensor is of {data.dtype}, codes of {codes.dtype} and scales of {scales.dtype}; give a "
            "float of at most 32 bits, float8_e4m3fn, float8_e5m2 or int8, and float32"
        )
    num_blocks = -(-data.numel() // block)
    if codes.numel() != data.numel() or scales.numel() != num_blocks:
        raise ValueError(
            f"{data.numel()} elements in blocks of {block} have as many codes and {num_blocks} "
            f"scales; codes has {codes.numel()} and scales {scales.numel()}; make them fit"
        )


def _start(
    kernel: object,
    data: Tensor,
    codes: Tensor,
    scales: Tensor,
    block: int,
    config: LaunchConfig | None,
) -> None:
    """One launch; two where only the last block keeps the others from moving in vectors."""
    numel = data.numel()
    if numel == 0:
        return
    flat, flat_codes = data.view(-1), codes.view(-1)
    pointers = (data.data_ptr(), codes.data_ptr())
    is_even = block % VECTOR_NUMEL == 0 and all(p % UNIT_BYTES == 0 for p in pointers)
    whole = numel if numel % VECTOR_NUMEL == 0 else numel // block * block
    if not is_even:
        _launch(kernel, flat, flat_codes, scales, block, 1, config)
        return
    num_whole = -(-whole // block)
    if whole > 0:
        parts = flat[:whole], flat_codes[:whole], scales[:num_whole]
        _launch(kernel, *parts, block, VECTOR_NUMEL, config)
    if whole < numel:
        rest = flat[whole:], flat_codes[whole:], scales[num_whole:]
        _launch(kernel, *rest, block, 1, config)


def _launch(
    kernel: object,
    data: Tensor,
    codes: Tensor,
    scales: Tensor,
    block: int,
    unit: int,
    config: LaunchConfig | None,
) -> None:
    config = config or LaunchConfig(num_warps=4)
    width = min(1 << (max(block, VECTOR_NUMEL) - 1).bit_length(), TILE_NUMEL)
    rows = max(1, TILE_NUMEL // width)
    stored = storage_of(data, "sum")
    launch(
        kernel,
        -(-scales.numel() // rows),
        config.num_warps,
        data=stored.tensor,
        codes=codes if codes.dtype == torch.int8 else codes.view(torch.uint8),
        scales=scales,
        numel=data.numel(),
        block_units=block // unit,
        num_scales=scales.numel(),
        KIND=stored.kind,
        CODE=CODES[codes.dtype],
        ROWS=rows,
        WIDTH=width,
        UNIT=unit,
    )
