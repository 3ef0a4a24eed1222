"""Collectives computed slowly and obviously: the oracle of the tests.

Every function takes what all ranks put in, a list indexed by rank, and returns what all ranks get
out, a list indexed by rank. Nothing is communicated and no input is modified; every output is a new
contiguous tensor.

The arithmetic is pycoll's contract, bit for bit:

- *Bracketing.* Contributions are combined in rank order, ``((x0 + x1) + x2) + …``.
- *Accumulate type.* float16, bfloat16, float8 (and the parts of complex32) are widened to float32,
  combined there, and rounded once at the end. Every other dtype is combined in its own width.
- *AVG.* Floats and complex: the sum in the accumulate type, divided by the number of ranks, then
  rounded once. Integers: the exact sum, divided by the number of ranks, truncated toward zero.
- *Integers.* SUM and PRODUCT wrap modulo 2**bits.
- *bool.* SUM = MAX = BOR = logical or; PRODUCT = MIN = BAND = logical and; BXOR = exclusive or;
  AVG is refused.
- *Complex.* SUM, AVG and PREMUL_SUM act on both parts; PRODUCT is ``(ac - bd) + (ad + bc)i``, each
  of its operations rounded on its own; there is no order, so MIN and MAX are refused.
- *NaN.* MIN and MAX return NaN wherever any rank holds one.
- *PREMUL_SUM.* Each contribution is multiplied by its rank's factor in the accumulate type, then
  added.
- *Quantisation.* docs/quantisation.md.

Operations are named by lower-case strings (`OPS`): nothing here needs ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Combine = Callable[[Tensor, Tensor], Tensor]
# The multiplier of "premul_sum": one for all ranks, or one for each.
Factor = float | Sequence[float]

OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor", "premul_sum")

FLOAT8_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *FLOAT8_DTYPES)
COMPLEX_DTYPES = (torch.complex32, torch.complex64, torch.complex128)
SIGNED_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED_DTYPES = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGER_DTYPES = (*SIGNED_DTYPES, *UNSIGNED_DTYPES)

# torch does no arithmetic on uint16, uint32 and uint64. In two's complement the sum and product of
# the signed twins have the same bits.
_SIGNED_TWIN = dict(zip(UNSIGNED_DTYPES, SIGNED_DTYPES, strict=True))
_NOT_FOR_FLOATS = {"band", "bor", "bxor"}
_NOT_FOR_COMPLEX = {"band", "bor", "bxor", "min", "max"}


def is_valid(op: str, dtype: torch.dtype) -> bool:
    """Whether `op`, one of `OPS`, is defined for `dtype`; where it is not, pycoll raises."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}; got {op!r}")
    if dtype in FLOAT_DTYPES:
        return op not in _NOT_FOR_FLOATS
    if dtype in COMPLEX_DTYPES:
        return op not in _NOT_FOR_COMPLEX
    if dtype in INTEGER_DTYPES:
        return op != "premul_sum"
    return dtype == torch.bool and op not in ("avg", "premul_sum")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which contributions of `dtype` are combined."""
    if dtype == torch.complex32:
        return torch.complex64
    narrow = dtype in FLOAT8_DTYPES or dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if narrow else dtype


def reduce_ranks(
    inputs: Sequence[Tensor], op: str = "sum", *, factor: Factor | None = None
) -> Tensor:
    """Combine one tensor per rank, all of the same shape and dtype, into one.

    `factor` belongs to "premul_sum" and to no other op.
    """
    dtype = inputs[0].dtype
    if not is_valid(op, dtype):
        raise TypeError(f"{op} is not defined for {dtype}")
    if (op == "premul_sum") != (factor is not None):
        raise ValueError(
            f"premul_sum takes a factor and no other op does; got op {op!r}, factor {factor!r}"
        )
    contributions = [_settled(x) for x in inputs]
    for rank, x in enumerate(contributions):
        if x.shape != contributions[0].shape or x.dtype != dtype:
            raise ValueError(
                f"rank {rank} holds {tuple(x.shape)} {x.dtype}, "
                f"rank 0 holds {tuple(contributions[0].shape)} {dtype}"
            )
    if dtype in FLOAT_DTYPES:
        return _reduce_floats(contributions, op, factor)
    if dtype in COMPLEX_DTYPES:
        return _reduce_complex(contributions, op, factor)
    if dtype == torch.bool:
        return _reduce_bools(contributions, op)
    return _reduce_integers(contributions, op)


def all_reduce(
    inputs: Sequence[Tensor], op: str = "sum", *, factor: Factor | None = None
) -> list[Tensor]:
    """Every rank gets the reduction of all inputs."""
    total = reduce_ranks(inputs, op, factor=factor)
    return [total.clone() for _ in inputs]


def reduce(
    inputs: Sequence[Tensor], dst: int, op: str = "sum", *, factor: Factor | None = None
) -> list[Tensor]:
    """Rank `dst` gets the reduction; every other rank keeps what it put in."""
    outputs = [_settled(x) for x in inputs]
    outputs[dst] = reduce_ranks(inputs, op, factor=factor)
    return outputs


def reduce_scatter(
    inputs: Sequence[Sequence[Tensor]], op: str = "sum", *, factor: Factor | None = None
) -> list[Tensor]:
    """The list form: rank `r` gets the reduction of ``inputs[s][r]`` over all ranks `s`.

    Sizes may differ with `r`.
    """
    world_size = len(inputs)
    _require_one_per_rank(inputs, world_size)
    return [
        reduce_ranks([row[rank] for row in inputs], op, factor=factor) for rank in range(world_size)
    ]


def reduce_scatter_tensor(
    inputs: Sequence[Tensor], op: str = "sum", *, factor: Factor | None = None
) -> list[Tensor]:
    """The tensor form: the reduction is cut along dim 0 into equal chunks, one per rank.

    Each input has shape ``(world_size * k, …)``, each output ``(k, …)``.
    """
    world_size = len(inputs)
    length = inputs[0].shape[0]
    if length % world_size:
        raise ValueError(f"dim 0 of size {length} does not divide into {world_size} equal chunks")
    total = reduce_ranks(inputs, op, factor=factor)
    chunk = length // world_size
    return [total[rank * chunk : (rank + 1) * chunk].clone() for rank in range(world_size)]


def all_gather(inputs: Sequence[Tensor]) -> list[list[Tensor]]:
    """The list form: every rank gets a copy of every input, which may differ in shape."""
    return [[_settled(x) for x in inputs] for _ in inputs]


def all_gather_into_tensor(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensor form: every rank gets the inputs concatenated along dim 0.

    Scalars become a vector.
    """
    rows = [_settled(x).reshape(1) if x.dim() == 0 else _settled(x) for x in inputs]
    whole = torch.cat([_bytes(row) for row in rows])
    shape = (sum(row.shape[0] for row in rows), *rows[0].shape[1:])
    return [whole.clone().view(rows[0].dtype).reshape(shape) for _ in inputs]


def broadcast(inputs: Sequence[Tensor], src: int) -> list[Tensor]:
    """Every rank gets what rank `src` holds."""
    return [_settled(inputs[src]) for _ in inputs]


def gather(inputs: Sequence[Tensor], dst: int) -> list[list[Tensor] | None]:
    """Rank `dst` gets a copy of every input; the others get nothing."""
    return [[_settled(x) for x in inputs] if rank == dst else None for rank in range(len(inputs))]


def scatter(inputs: Sequence[Sequence[Tensor] | None], src: int) -> list[Tensor]:
    """Rank `r` gets ``inputs[src][r]``."""
    rows = inputs[src]
    if rows is None or len(rows) != len(inputs):
        raise ValueError(
            f"rank {src} must hold one tensor for each of {len(inputs)} ranks; got {rows!r}"
        )
    return [_settled(x) for x in rows]


def all_to_all(inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The list form: rank `r` gets ``inputs[s][r]`` from every rank `s`; sizes may differ."""
    world_size = len(inputs)
    _require_one_per_rank(inputs, world_size)
    return [[_settled(row[rank]) for row in inputs] for rank in range(world_size)]


def all_to_all_single(
    inputs: Sequence[Tensor], input_splits: Sequence[Sequence[int]] | None = None
) -> list[Tensor]:
    """The tensor form: rank `s` cuts its input along dim 0 and sends piece `r` to rank `r`.

    ``input_splits[s][r]`` is the length of that piece along dim 0; without it all pieces are equal.
    """
    world_size = len(inputs)
    if input_splits is None:
        for rank, x in enumerate(inputs):
            if x.shape[0] % world_size:
                raise ValueError(
                    f"dim 0 of rank {rank}'s input, {x.shape[0]}, is no multiple of {world_size}"
                )
        input_splits = [[x.shape[0] // world_size] * world_size for x in inputs]
    pieces = [
        torch.split(_settled(x), list(row)) for x, row in zip(inputs, input_splits, strict=True)
    ]
    return [all_gather_into_tensor([row[rank] for row in pieces])[0] for rank in range(world_size)]


# --- block-wise quantisation -----------------------------------------------------------------------

# The largest magnitude a code stands for.
LARGEST_CODE = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def quantise_blocks(x: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, of the shape of `x`, and a float32 scale for each `block` elements in logical order."""
    largest = LARGEST_CODE[dtype]
    flat = _settled(x).flatten().float()
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    amax = rows.abs().amax(1)  # NaN is a maximum, too
    scales = (amax.double() / largest).float()
    too_large = scales.double() * largest > amax.double()
    scales = torch.where(too_large, torch.nextafter(scales, torch.zeros(())), scales)
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    quotients = (rows / scales[:, None]).clamp(-largest, largest)
    is_finite = amax.isfinite()
    scales = torch.where(is_finite, scales, torch.nan)
    quotients = torch.where(is_finite[:, None], quotients, 0.0)
    codes = (quotients.round() if dtype == torch.int8 else quotients).to(dtype)
    return codes.view(-1)[: len(flat)].view(x.shape), scales


def dequantise_blocks(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Codes times their block's scale, in float32."""
    each = scales.repeat_interleave(block)[: codes.numel()].view(codes.shape)
    return codes.float() * each


def quantisation_bound(x: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """The most by which quantisation may change each element of `x`, in float64."""
    each = scales.double().repeat_interleave(block)[: x.numel()].view(x.shape)
    if dtype == torch.int8:
        most = each / 2
    elif dtype == torch.float8_e4m3fn:
        most = torch.maximum(x.double().abs() / 16, each * 2.0**-10)
    else:
        most = torch.maximum(x.double().abs() / 8, each * 2.0**-17)
    return most * (1 + 2.0**-21) + 2.0**-149


def through_wire(x: Tensor, wire_dtype: torch.dtype, block: int) -> Tensor:
    """What arrives of `x`, in float32."""
    if wire_dtype in LARGEST_CODE:
        return dequantise_blocks(*quantise_blocks(x, block, wire_dtype), block)
    return x.float().to(wire_dtype).float()


def all_reduce_on_wire(
    inputs: Sequence[Tensor],
    op: str = "sum",
    *,
    wire_dtype: torch.dtype,
    block: int = 128,
    factor: Factor | None = None,
) -> list[Tensor]:
    """Contributions travel, are combined in float32, and the result travels once more."""
    if len(inputs) == 1:  # nothing travels
        return all_reduce(inputs, op, factor=factor)
    arrived = [through_wire(x, wire_dtype, block) for x in inputs]
    total = through_wire(reduce_ranks(arrived, op, factor=factor), wire_dtype, block)
    return [total.to(inputs[0].dtype) for _ in inputs]


def reduce_scatter_on_wire(
    inputs: Sequence[Sequence[Tensor]],
    op: str = "sum",
    *,
    wire_dtype: torch.dtype,
    block: int = 128,
    factor: Factor | None = None,
) -> list[Tensor]:
    """The list form: every tensor of a list travels by itself, the results do not."""
    if len(inputs) == 1:
        return reduce_scatter(inputs, op, factor=factor)
    arrived = [[through_wire(x, wire_dtype, block) for x in row] for row in inputs]
    totals = reduce_scatter(arrived, op, factor=factor)
    return [total.to(inputs[0][0].dtype) for total in totals]


def all_gather_on_wire(
    inputs: Sequence[Tensor], *, wire_dtype: torch.dtype, block: int = 128
) -> list[list[Tensor]]:
    """The list form: every rank gets what arrives of each input, of its own, too."""
    if len(inputs) == 1:
        return all_gather(inputs)
    arrived = [through_wire(x, wire_dtype, block).to(x.dtype) for x in inputs]
    return [[x.clone() for x in arrived] for _ in inputs]


def _settled(x: Tensor) -> Tensor:
    """A contiguous copy, with lazy conjugation and negation carried out."""
    return x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a vector of uint8."""
    return x.reshape(-1).view(torch.uint8)


def _require_one_per_rank(inputs: Sequence[Sequence[Tensor]], world_size: int) -> None:
    for rank, row in enumerate(inputs):
        if len(row) != world_size:
            raise ValueError(
                f"rank {rank} must hold one tensor per rank, {world_size}; got {len(row)}"
            )


def _in_rank_order(contributions: Sequence[Tensor], combine: Combine) -> Tensor:
    total = contributions[0]
    for x in contributions[1:]:
        total = combine(total, x)
    return total


def _divided(total: Tensor, world_size: int) -> Tensor:
    # A scalar divisor might become a multiplication by its reciprocal, which rounds differently.
    return total / torch.full_like(total, world_size)


def _smaller(total: Tensor, x: Tensor) -> Tensor:
    return torch.where((x < total) | x.isnan(), x, total)


def _larger(total: Tensor, x: Tensor) -> Tensor:
    return torch.where((x > total) | x.isnan(), x, total)


def _reduce_floats(contributions: Sequence[Tensor], op: str, factor: Factor | None) -> Tensor:
    dtype = contributions[0].dtype
    wide = [x.to(accumulate_dtype(dtype)) for x in contributions]
    if factor is not None:
        factors = factor if isinstance(factor, Sequence) else [factor] * len(wide)
        scales = torch.tensor(factors, dtype=wide[0].dtype)
        wide = [x * scale for x, scale in zip(wide, scales, strict=True)]
    combines: dict[str, Combine] = {"min": _smaller, "max": _larger, "product": torch.mul}
    total = _in_rank_order(wide, combines.get(op, torch.add))
    if op == "avg":
        total = _divided(total, len(contributions))
    return total.to(dtype)


def _reduce_complex(contributions: Sequence[Tensor], op: str, factor: Factor | None) -> Tensor:
    parts = [torch.view_as_real(x) for x in contributions]
    if op == "product":
        wide = [x.to(accumulate_dtype(x.dtype)) for x in parts]
        return torch.view_as_complex(_in_rank_order(wide, _complex_product).to(parts[0].dtype))
    return torch.view_as_complex(_reduce_floats(parts, op, factor))


def _complex_product(x: Tensor, y: Tensor) -> Tensor:
    """Of two tensors whose last dim is (real, imaginary).

    Spelt out, because torch's own product may fuse some of its operations.
    """
    a, b = x.unbind(-1)
    c, d = y.unbind(-1)
    return torch.stack([a * c - b * d, a * d + b * c], dim=-1)


def _reduce_bools(contributions: Sequence[Tensor], op: str) -> Tensor:
    combine: Combine
    if op in ("sum", "max", "bor"):
        combine = torch.logical_or
    elif op in ("product", "min", "band"):
        combine = torch.logical_and
    else:
        combine = torch.logical_xor
    # Any nonzero byte is true, and the result holds only the bytes 0 and 1, even for one rank.
    truths = [x.view(torch.uint8) != 0 for x in contributions]
    return _in_rank_order(truths, combine)


def _reduce_integers(contributions: Sequence[Tensor], op: str) -> Tensor:
    dtype = contributions[0].dtype
    if op == "avg":
        return _integer_average(contributions)
    twin = _SIGNED_TWIN.get(dtype, dtype)
    signed = [x.view(twin) for x in contributions]
    if op in ("min", "max"):
        # Flipping the top bit maps unsigned order onto signed order, and once more maps it back.
        flip = torch.iinfo(twin).min if twin != dtype else 0
        extreme: Combine = torch.minimum if op == "min" else torch.maximum
        return (_in_rank_order([x ^ flip for x in signed], extreme) ^ flip).view(dtype)
    combines: dict[str, Combine] = {
        "sum": torch.add,
        "product": torch.mul,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
    return _in_rank_order(signed, combines[op]).view(dtype)


def _integer_average(contributions: Sequence[Tensor]) -> Tensor:
    """The exact sum, divided and truncated toward zero."""
    dtype, world_size = contributions[0].dtype, len(contributions)
    if dtype.itemsize < 8:  # int64 holds the sum of two billion of these
        total = _in_rank_order([x.to(torch.int64) for x in contributions], torch.add)
        return torch.div(total, world_size, rounding_mode="trunc").to(dtype)
    columns = zip(*(x.reshape(-1).tolist() for x in contributions), strict=True)
    totals = [sum(column) for column in columns]  # of Python integers, which have no limit
    means = [total // world_size if total >= 0 else -(-total // world_size) for total in totals]
    return torch.tensor(means, dtype=dtype).reshape(contributions[0].shape)
