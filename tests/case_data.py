"""What each rank puts into a case: every element depends on its position and on the rank.

Data is *exact* where every intermediate sum or product, in any order, is a number of the dtype:
then every order of additions gives the same bits. *Inexact* data rounds at every step, so that its
result has the right bits only for the one order that pycoll promises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pycoll import reference

# Of premul_sum, by rank and then around again. Powers of two keep exact data exact.
EXACT_FACTORS = (0.5, -2.0, 0.25, 4.0)
INEXACT_FACTORS = (0.7, -1.3, 0.45, 1.9)

# Integers up to these are numbers of the dtype.
_EXACT_LIMIT = {
    torch.float64: 2**53,
    torch.float32: 2**24,
    torch.float16: 2**11,
    torch.bfloat16: 2**8,
    torch.float8_e4m3fn: 2**4,
    torch.float8_e4m3fnuz: 2**4,
    torch.float8_e5m2: 2**3,
    torch.float8_e5m2fnuz: 2**3,
}
_HAS_INFINITY = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    torch.float8_e5m2,
)
_REAL_OF = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def contribution(
    dtype: torch.dtype,
    op: str,
    numel: int,
    *,
    rank: int,
    world_size: int,
    salt: int = 0,
    exact: bool = False,
) -> Tensor:
    """The `numel` elements that `rank` of `world_size` puts in, as a vector.

    op: one of `reference.OPS`, or "none" for data that is only moved.
    salt: another number gives other data.
    """
    if dtype == torch.bool:
        return hashed(numel, rank, salt) % 2 == 0
    if op == "none" or dtype in reference.INTEGER_DTYPES:
        # All bit patterns: extremes and wrapping sums of integers, NaN payloads of moved floats.
        return _random_bytes(numel * dtype.itemsize, rank, salt).view(dtype)
    if dtype in _REAL_OF:
        if op == "product":
            return _gaussian_integers(dtype, numel, rank, salt)
        parts = _floats(_REAL_OF[dtype], op, 2 * numel, rank, world_size, salt, exact)
        return torch.view_as_complex(parts.view(numel, 2))
    return _floats(dtype, op, numel, rank, world_size, salt, exact)


def premul_factors(world_size: int, *, exact: bool) -> list[float]:
    """The factor of every rank; neighbours' factors differ."""
    factors = EXACT_FACTORS if exact else INEXACT_FACTORS
    return [factors[rank % len(factors)] for rank in range(world_size)]


def uneven_numel(numel: int, index: int) -> int:
    """Of the chunk `index` among chunks whose sizes differ; some chunks are empty."""
    return (numel, numel + 1, 0, 2 * numel, numel // 2)[index % 5]


def hashed(numel: int, rank: int, salt: int) -> Tensor:
    """Integers in [0, 2**31) without a period that a chunk or a stride could be a multiple of."""
    h = torch.arange(numel, dtype=torch.int64) * 2654435761 + rank * 1013904223 + salt * 374761393
    h = (h ^ (h >> 15)) & 0x7FFFFFFF
    h = h * 2246822519
    return (h ^ (h >> 13)) & 0x7FFFFFFF


def _random_bytes(nbytes: int, rank: int, salt: int) -> Tensor:
    words = hashed(-(-nbytes // 4), rank, salt) * 2654435761 % 2**32
    return words.to(torch.int32).view(torch.uint8)[:nbytes].clone()


def _floats(
    dtype: torch.dtype, op: str, numel: int, rank: int, world_size: int, salt: int, exact: bool
) -> Tensor:
    if op in ("min", "max"):
        values, h = _random_floats(dtype, numel, rank, salt), hashed(numel, rank, salt)
        return _with_special_values(values, h, rank, world_size)
    if not exact:
        if op == "product":  # factors near 1, for a product that neither overflows nor vanishes
            return (_uniform(numel, rank, salt) * 1.5 + 0.5).to(dtype)
        return _random_floats(dtype, numel, rank, salt)
    h = hashed(numel, rank, salt)
    if op == "product":
        return (torch.exp2(h % 3 - 1.0) * (1 - 2 * (h // 3 % 2))).to(dtype)
    bound = min(125, _EXACT_LIMIT[dtype] // world_size)
    values = (h % (2 * bound + 1) - bound) * 0.25
    if op == "premul_sum":  # products with the factors are of one magnitude
        values *= 0.5 / abs(premul_factors(world_size, exact=True)[rank])
    return values.to(dtype)


def _uniform(numel: int, rank: int, salt: int) -> Tensor:
    generator = torch.Generator().manual_seed(salt * 1000003 + rank)
    return torch.rand(numel, generator=generator, dtype=torch.float64)


def _random_floats(dtype: torch.dtype, numel: int, rank: int, salt: int) -> Tensor:
    """Of both signs and of magnitudes from 1/16 to 16, where additions lose low bits."""
    uniform = _uniform(2 * numel, rank, salt)
    exponents = torch.floor(uniform[:numel] * 8) - 4
    return ((uniform[numel:] * 2 - 1) * torch.exp2(exponents)).to(dtype)


def _with_special_values(values: Tensor, h: Tensor, rank: int, world_size: int) -> Tensor:
    """NaN and infinities in places that differ from rank to rank, and no zeros.

    Whether -0 or +0 is the smaller is not part of any contract.
    """
    wide = values.to(torch.float64)
    wide[wide == 0] = 0.25
    if values.dtype in _HAS_INFINITY:
        wide[h % 29 == 1] = torch.inf
        wide[h % 29 == 2] = -torch.inf
    wide[h % 31 == 3] = torch.nan
    if len(wide) > 2 and rank == world_size - 1:
        wide[-1] = torch.nan  # the tail, and the rank whose contribution comes last
    return wide.to(values.dtype)


def _gaussian_integers(dtype: torch.dtype, numel: int, rank: int, salt: int) -> Tensor:
    """1 + 2i turned by multiples of 90 degrees.

    No product of these has a part that is zero, so the sign of zero, which would depend on the
    order of multiplications, never comes up.
    """
    turned = torch.tensor([[1, 2], [-2, 1], [-1, -2], [2, -1]], dtype=_REAL_OF[dtype])
    return torch.view_as_complex(turned[hashed(numel, rank, salt) % 4])
