"""Data on which the result of a collective is known exactly.

Element i of rank r's input is (7 i + 13 r) mod m: neighbours differ, ranks differ, and m is a prime
so large as still lets the sum over all ranks be exact in the dtype. A result that is shifted, has
chunks swapped, misses its tail or a rank, or is the input handed back, therefore differs from the
expected one, and equality is the right comparison. For the average the inputs are multiples of the
number of ranks, for the product they are 1 or 2.
Rounding is not tested here: nothing is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pycoll.bench.cases import DTYPES, EXACT_UP_TO, Case, total_numel

ROOT = 0
_LARGEST_MODULUS = 65_521


def exact_modulus(dtype: torch.dtype, world_size: int, reduce_op: str = "sum") -> int:
    """The largest prime m, up to 65521, for which every partial result is exact in the dtype:
    world_size × (m − 1) for a sum, as often again for an average of multiples of world_size.

    Raises:
        ValueError: if there is none, that is, too many ranks for so narrow a dtype.
    """
    largest = EXACT_UP_TO[dtype]
    if reduce_op == "product":
        if 2**world_size > largest:
            raise ValueError(f"products over {world_size} ranks are not exact in {dtype}")
        return _prime_up_to(_LARGEST_MODULUS)
    terms = world_size**2 if reduce_op == "avg" else world_size
    modulus = _prime_up_to(min(_LARGEST_MODULUS, largest // terms + 1))
    if modulus < 2:
        raise ValueError(f"sums over {world_size} ranks are not exact in {dtype}")
    return modulus


def _prime_up_to(limit: int) -> int:
    for candidate in range(limit, 1, -1):
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            return candidate
    return 0


class ExactData:
    """Inputs and right results of one case on one rank, on the CPU.

    Attributes:
        part: elements of a rank's part, for collectives that are cut into parts.
        in_numel, out_numel: elements of this rank's input and result; 0 where it has none.
    """

    def __init__(self, case: Case, rank: int, world_size: int) -> None:
        self._case, self._rank, self._world_size = case, rank, world_size
        self._dtype = DTYPES[case.dtype]
        self._modulus = exact_modulus(self._dtype, world_size, case.reduce_op)
        numel = total_numel(case, world_size)
        self.part = numel // world_size
        is_root = rank == ROOT
        self.in_numel = {
            "all_gather": self.part,
            "gather": self.part,
            "scatter": numel if is_root else 0,
        }.get(case.op, numel)
        self.out_numel = {
            "reduce_scatter": self.part,
            "scatter": self.part,
            "gather": numel if is_root else 0,
            "reduce": numel if is_root else 0,
        }.get(case.op, numel)

    def input(self) -> Tensor:
        """(in_numel,) in the case's dtype."""
        return self._tiled(self._period(self._rank), 0, self.in_numel)

    def expected(self) -> Tensor:
        """The right result, by arithmetic: (out_numel,) in the case's dtype."""
        op, ranks = self._case.op, range(self._world_size)
        if op == "broadcast":
            return self._tiled(self._period(ROOT), 0, self.out_numel)
        if op == "send_recv":
            before = (self._rank - 1) % self._world_size
            return self._tiled(self._period(before), 0, self.out_numel)
        if op == "scatter":
            return self._tiled(self._period(ROOT), self._rank * self.part, self.out_numel)
        if op in ("all_reduce", "reduce", "reduce_scatter"):
            start = self._rank * self.part if op == "reduce_scatter" else 0
            return self._tiled(self._reduced(), start, self.out_numel)
        if op == "gather" and self._rank != ROOT:
            return torch.zeros(0, dtype=self._dtype)
        start = self._rank * self.part if op == "all_to_all" else 0
        return torch.cat([self._tiled(self._period(rank), start, self.part) for rank in ranks])

    def _period(self, rank: int) -> Tensor:
        """One period of a rank's input, (m,) int64: the pattern repeats after m elements, which
        makes it cheap to tile.
        """
        period = (7 * torch.arange(self._modulus) + 13 * rank) % self._modulus
        if self._case.reduce_op == "avg":
            return period * self._world_size
        return period % 2 + 1 if self._case.reduce_op == "product" else period

    def _reduced(self) -> Tensor:
        periods = torch.stack([self._period(rank) for rank in range(self._world_size)])
        match self._case.reduce_op:
            case "sum":
                return periods.sum(dim=0)
            case "avg":
                return periods.sum(dim=0) // self._world_size
            case "product":
                return periods.prod(dim=0)
            case "min":
                return periods.amin(dim=0)
            case _:
                return periods.amax(dim=0)

    def _tiled(self, period: Tensor, start: int, numel: int) -> Tensor:
        first = start % self._modulus
        repeats = -(-(first + numel) // self._modulus)
        return period.to(self._dtype).repeat(repeats)[first : first + numel]
