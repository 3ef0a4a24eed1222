"""One rank's buffers for a timed collective, and data on which its result is known exactly.

Element i of rank r's input is (7 i + 13 r) mod m: neighbours differ, ranks differ, and m is a prime
so large as still lets the sum over all ranks be exact in the dtype. A result that is shifted, has
chunks swapped, misses its tail or a rank, or is the input handed back, therefore differs from the
expected one, and equality is the right comparison.
Rounding is not tested here: nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pycoll.bench.formulas import SIZE_MEANING

OPS = tuple(SIZE_MEANING)
BROADCAST_ROOT = 0
_LARGEST_MODULUS = 65_521
# Integers up to this size are exact in the dtype, and so is every partial sum of them.
_EXACT_UP_TO = {
    torch.float64: 1 << 53,
    torch.float32: 1 << 24,
    torch.float16: 1 << 11,
    torch.bfloat16: 1 << 8,
    torch.int64: (1 << 63) - 1,
    torch.int32: (1 << 31) - 1,
    torch.uint8: (1 << 8) - 1,
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _EXACT_UP_TO}


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        op: one of `OPS`.
        nbytes: S as the formulas define it (`SIZE_MEANING`); see `total_numel` for its rounding.
        dtype: a key of `DTYPES`.
        async_op: call with async_op=True and wait at once, instead of the blocking call.
    """

    op: str
    nbytes: int
    dtype: str = "float32"
    async_op: bool = False

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"unknown op {self.op!r}; known: {', '.join(OPS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        if self.nbytes < 1:
            raise ValueError(f"nbytes must be positive, got {self.nbytes}")


def total_numel(case: Case, world_size: int) -> int:
    """Elements that S stands for: at least one, and a multiple of world_size where the op cuts S
    into a part a rank.
    """
    numel = max(1, case.nbytes // DTYPES[case.dtype].itemsize)
    if case.op in ("all_reduce", "broadcast"):
        return numel
    return max(1, numel // world_size) * world_size


def total_nbytes(case: Case, world_size: int) -> int:
    """S in bytes as it is really timed."""
    return total_numel(case, world_size) * DTYPES[case.dtype].itemsize


def exact_modulus(dtype: torch.dtype, world_size: int) -> int:
    """The largest prime m, up to 65521, for which world_size × (m − 1) is exact in the dtype.

    Raises:
        ValueError: if there is none, that is, too many ranks for so narrow a dtype.
    """
    for candidate in range(min(_LARGEST_MODULUS, _EXACT_UP_TO[dtype] // world_size + 1), 1, -1):
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            return candidate
    raise ValueError(f"sums over {world_size} ranks are not exact in {dtype}")


class Buffers:
    """Tensors of one rank, the bound call, and the check of its result.

    Attributes:
        call: runs the collective once and returns when its result may be read.

    Args:
        case: what to run.
        rank: this rank.
        world_size: ranks in the group.
        api: where the collectives are looked up: torch.distributed, or a stand-in under test.
    """

    def __init__(self, case: Case, rank: int, world_size: int, api: Any = dist) -> None:
        self._case, self._rank, self._world_size = case, rank, world_size
        self._dtype = DTYPES[case.dtype]
        self._modulus = exact_modulus(self._dtype, world_size)
        numel = total_numel(case, world_size)
        self._part = numel // world_size
        self._in_numel = self._part if case.op == "all_gather" else numel
        self._out_numel = self._part if case.op == "reduce_scatter" else numel
        in_place = case.op in ("all_reduce", "broadcast")
        self.source = torch.zeros(self._in_numel, dtype=self._dtype)
        self.result = self.source if in_place else torch.zeros(self._out_numel, dtype=self._dtype)
        self.call = self._bind(api)

    def _bind(self, api: Any) -> Callable[[], None]:
        calls: dict[str, Callable[..., Any]] = {
            "all_reduce": partial(api.all_reduce, self.source),
            "broadcast": partial(api.broadcast, self.source, BROADCAST_ROOT),
            "all_gather": partial(api.all_gather_into_tensor, self.result, self.source),
            "reduce_scatter": partial(api.reduce_scatter_tensor, self.result, self.source),
            "all_to_all": partial(api.all_to_all_single, self.result, self.source),
        }
        call = calls[self._case.op]
        if not self._case.async_op:
            return call
        start = partial(call, async_op=True)

        def start_and_wait() -> None:
            start().wait()

        return start_and_wait

    def load(self) -> None:
        """Writes this rank's input, and spoils every element of a separate output, so that stale
        results show.
        """
        self.source.copy_(self._tiled(self._period(self._rank), 0, self._in_numel))
        if self.result is not self.source:
            torch.add(self.expected(), 1, out=self.result)

    def clear(self) -> None:
        """Zeroes the buffers: sums of zeros neither overflow nor become denormal, however often
        they are repeated.
        """
        self.source.zero_()
        self.result.zero_()

    def count_wrong(self) -> int:
        """Elements of the result that are not the expected ones, after one call on loaded data."""
        return int((self.result != self.expected()).sum())

    def expected(self) -> Tensor:
        """The right result, by arithmetic: (output elements,) in the case's dtype."""
        op, ranks = self._case.op, range(self._world_size)
        if op == "broadcast":
            return self._tiled(self._period(BROADCAST_ROOT), 0, self._out_numel)
        if op in ("all_reduce", "reduce_scatter"):
            summed = torch.stack([self._period(rank) for rank in ranks]).sum(dim=0)
            return self._tiled(
                summed, self._rank * self._part if op == "reduce_scatter" else 0, self._out_numel
            )
        start = self._rank * self._part if op == "all_to_all" else 0
        return torch.cat([self._tiled(self._period(rank), start, self._part) for rank in ranks])

    def _period(self, rank: int) -> Tensor:
        """One period of a rank's input, (m,) int64: the pattern repeats after m elements, which
        makes it cheap to tile.
        """
        return (7 * torch.arange(self._modulus) + 13 * rank) % self._modulus

    def _tiled(self, period: Tensor, start: int, numel: int) -> Tensor:
        first = start % self._modulus
        repeats = -(-(first + numel) // self._modulus)
        return period.to(self._dtype).repeat(repeats)[first : first + numel]
