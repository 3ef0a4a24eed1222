"""What the launchers of collective kernels have in common: checks of tensors, and arguments that kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pycoll import reference
from pycoll.triton_kernels.group import TritonGroup, fingerprint
from pycoll.triton_kernels.storage import (
    Storage,
    check_contiguous,
    float_bits,
)


def check(group: TritonGroup, tensors: dict[str, Tensor], op: str | None) -> None:
    check_contiguous(tensors, group.device)
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.dtype != first.dtype:
            raise ValueError(
                f"{name} is of {tensor.dtype} and {first_name} of {first.dtype}; make them equal"
            )
    if op is not None and not reference.is_valid(op, first.dtype):
        raise ValueError(f"op {op} has no meaning for {first.dtype}; choose another op or dtype")


def num_blocks_for(group: TritonGroup, work_units: int, block_units: int) -> int:
    """As many programs as there is work for; equal on all ranks."""
    return max(1, min(group.layout.config.num_blocks, -(-work_units // block_units)))


@dataclass(frozen=True)
class Reduction:
    """The arguments that kernels of all reductions share."""

    group: TritonGroup
    source: Storage
    target: Storage
    op: str
    factor: float

    def arguments(self, *what: object) -> dict[str, Any]:
        source = self.source
        return {
            "group": self.group.table,
            "input": source.tensor,
            "output": self.target.tensor,
            "fingerprint": fingerprint(*what, self.op, source.kind, str(source.tensor.dtype)),
            "factor_bits": float_bits(self.factor),
            "divisor": self.group.world_size,
            "KIND": source.kind,
            "OP": self.op,
            **shape_of(self.group, source),
        }


def shape_of(group: TritonGroup, source: Storage) -> dict[str, int]:
    block = group.layout.config.block_numel(source.tensor.element_size())
    return {"UNIT": source.unit_numel, "BLOCK": block}


def numels_of(
    group: TritonGroup, numels: Sequence[int] | None, whole: tuple[str, int], own: tuple[str, int]
) -> list[int]:
    """Elements of each rank's chunk; `whole` and `own` are names and sizes of the tensors that must fit."""
    n = group.world_size
    if numels is None:
        if whole[1] != n * own[1]:
            raise ValueError(
                f"{whole[0]} has {whole[1]} elements and {own[0]} {own[1]}, in a group of {n}; give "
                f"{whole[0]} {n} times as many, or say by numels what each rank has"
            )
        return [own[1]] * n
    if len(numels) != n or min(numels) < 0:
        raise ValueError(f"numels is {list(numels)}; give one number for each of {n} ranks")
    if sum(numels) != whole[1] or numels[group.rank] != own[1]:
        raise ValueError(
            f"numels is {list(numels)}, but {whole[0]} has {whole[1]} elements and {own[0]} {own[1]} "
            f"(rank {group.rank}); make them fit"
        )
    return list(numels)


def chunks_are_aligned(storage: Storage, numels: Sequence[int], *others: Storage) -> bool:
    """Whether every chunk begins at a multiple of 16 bytes; the last one may have any size."""
    fits = all(numel % storage.unit_numel == 0 for numel in numels[:-1])
    return fits and all(other.is_aligned for other in (storage, *others))
