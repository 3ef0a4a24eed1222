"""torch's symmetric-memory operators on GPUs under the names that torch.distributed has: all_reduce is what
they share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Above this many bytes each rank reduces its part and hands it on, instead of everything for itself.
_ONE_SHOT_MOST_NBYTES = 256 << 10


class SymmMemApi:
    """The default group's operators. Tensors have to come from `zeros`, a collective call."""

    def __init__(self) -> None:
        self._group = dist.group.WORLD
        assert self._group is not None
        self._name = self._group.group_name

    def zeros(self, numel: int, *, dtype: torch.dtype, device: str) -> Tensor:
        """(numel,) in memory that all ranks map."""
        import torch.distributed._symmetric_memory as symmetric

        tensor: Tensor = symmetric.empty(max(1, numel), dtype=dtype, device=torch.device(device))
        symmetric.rendezvous(tensor, self._name)
        return tensor[:numel].zero_()

    def _operator(self, name: str) -> Callable[..., Any]:
        return getattr(torch.ops.symm_mem, name)

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        self._check_sum(op)
        self._operator("two_shot_all_reduce_")(tensor, "sum", self._name)

    def all_reduce_into(self, output: Tensor, tensor: Tensor, op: Any) -> None:
        self._check_sum(op)
        small = tensor.numel() * tensor.itemsize <= _ONE_SHOT_MOST_NBYTES
        name = "one_shot_all_reduce_out" if small else "two_shot_all_reduce_out"
        self._operator(name)(tensor, "sum", self._name, output)

    def _check_sum(self, op: Any) -> None:
        if op != dist.ReduceOp.SUM:
            raise TypeError(f"symmetric-memory operators only sum; op is {op}")
