"""What the launchers of collective kernels have in common: checks of tensors, and arguments that kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pycoll import reference
from pycoll.triton_kernels.group import Layout, TritonGroup, fingerprint
from pycoll.triton_kernels.launching import launch
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


def num_blocks_for(layout: Layout, work_units: int, block_units: int) -> int:
    """As many programs as there is work for; equal on all ranks."""
    return max(1, min(layout.config.num_blocks, -(-work_units // block_units)))


def launch_by_slots(kernel: object, layout: Layout, chunk_units: int, **arguments: Any) -> None:
    """A kernel whose blocks share out chunks of up to `chunk_units` by the slot."""
    num_blocks = num_blocks_for(layout, chunk_units, layout.slot_units)
    launch(kernel, num_blocks, layout.config.num_warps, slot_units=layout.slot_units, **arguments)


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
    group: TritonGroup,
    numels: Sequence[int] | None,
    whole: tuple[str, Tensor],
    own: tuple[str, Tensor],
) -> list[int]:
    """Elements of each rank's chunk, where both parts of a complex number are elements. `whole` and `own`: the tensors
    that must fit, with their names."""
    n, whole_numel, own_numel = group.world_size, whole[1].numel(), own[1].numel()
    if numels is None:
        if whole_numel != n * own_numel:
            raise ValueError(
                f"{whole[0]} has {whole_numel} elements and {own[0]} {own_numel}, in a group of {n}; give "
                f"{whole[0]} {n} times as many, or say by numels what each rank has"
            )
        numels = [own_numel] * n
    if len(numels) != n or min(numels) < 0:
        raise ValueError(f"numels is {list(numels)}; give one number for each of {n} ranks")
    if sum(numels) != whole_numel or numels[group.rank] != own_numel:
        raise ValueError(
            f"numels is {list(numels)}, but {whole[0]} has {whole_numel} elements and {own[0]} {own_numel} "
            f"(rank {group.rank}); make them fit"
        )
    parts = 2 if own[1].is_complex() else 1
    return [numel * parts for numel in numels]


def chunks_are_aligned(storage: Storage, numels: Sequence[int], *others: Storage) -> bool:
    """Whether every chunk begins at a multiple of 16 bytes; the last one may have any size."""
    fits = all(numel % storage.unit_numel == 0 for numel in numels[:-1])
    return fits and all(other.is_aligned for other in (storage, *others))
