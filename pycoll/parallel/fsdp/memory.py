"""What a sharded model costs in bytes, predicted and measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pycoll.parallel.fsdp.schedule import UnitState, state_of


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank.

    Attributes:
        ranks: that divide parameters.
        num_parameters: elements of all parameters, whole.
        predicted: for ZeRO stages 0 to 3, bytes of parameters, gradients and optimizer state together (Rajbhandari et
            al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5): with P, G and O
            bytes of
            the whole, stage 0: P + G + O; 1: P + G + O/n; 2: P + (G + O)/n; 3: (P + G + O)/n.
        parameters, gradients, optimizer: what parts take now.
        buffers: of the model, which every rank has whole.
        whole: unit buffers that hold memory now.
        accumulated: whole gradients that have not been reduced.
        units: name and bytes of every unit buffer while it is there, the largest first.
    """

    ranks: int
    num_parameters: int
    predicted: dict[int, int]
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    whole: int
    accumulated: int
    units: list[tuple[str, int]] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Predicted of a training step with prefetching: parts, buffers, and the two largest units' whole parameters
        and whole gradients.
        """
        largest = sum(nbytes for _, nbytes in self.units[:2])
        return (
            self.parameters
            + max(self.gradients, self.parameters)
            + self.optimizer
            + self.buffers
            + 2 * largest
        )

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.num_parameters:,} parameters, {self.ranks} ranks")
        table.add_column("bytes on this rank")
        table.add_column("now", justify="right")
        for name in ("parameters", "gradients", "optimizer", "buffers", "whole", "accumulated"):
            table.add_row(name, f"{getattr(self, name):,}")
        for stage, nbytes in self.predicted.items():
            table.add_row(f"predicted, ZeRO-{stage}", f"{nbytes:,}")
        table.add_row("predicted peak of a step", f"{self.peak:,}")
        for name, nbytes in self.units[:2]:
            table.add_row(f"largest units: {name}", f"{nbytes:,}")
        console = Console(width=100)
        with console.capture() as captured:
            console.print(table)
        return captured.get()


def memory_report(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """Bytes per rank of a model that `fully_shard` has divided. Not collective.

    Args:
        optimizer: whose state counts; None: none. Before its first step it has none, and predictions use Adam's, two
            numbers a parameter.

    Raises:
        TypeError: `model` is no module.
        ValueError: nothing in the model is sharded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    states = [s for m in model.modules() if (s := state_of(m)) is not None]
    if not states:
        raise ValueError(
            f"this {type(model).__name__} has no sharded module; call fully_shard first"
        )
    ranks = max(state.unit.sharding.size for state in states)
    sharded = [p for state in states for p in state.unit.parameters]
    own = {id(p.sharded): p for p in sharded}
    rest = [p for p in _parameters(states, model) if id(p) not in own]
    whole_bytes = sum(p.sharded.numel() * p.sharded.element_size() for p in sharded) + _nbytes(rest)
    trainable = [p.sharded for p in sharded if p.sharded.requires_grad]
    gradient_bytes = sum(p.numel() * p.element_size() for p in trainable)
    gradient_bytes += _nbytes(p for p in rest if p.requires_grad)
    held = _optimizer_bytes(optimizer)
    optimizer_bytes = held * ranks if held else 2 * gradient_bytes
    parts = sum(g.local.numel() * g.local.element_size() for s in states for g in s.unit.groups)
    return MemoryReport(
        ranks,
        sum(p.sharded.numel() for p in sharded) + sum(p.numel() for p in rest),
        {
            0: whole_bytes + gradient_bytes + optimizer_bytes,
            1: whole_bytes + gradient_bytes + optimizer_bytes // ranks,
            2: whole_bytes + (gradient_bytes + optimizer_bytes) // ranks,
            3: (whole_bytes + gradient_bytes + optimizer_bytes) // ranks,
        },
        parts + _nbytes(rest),
        _nbytes(p.grad for p in [*trainable, *rest] if p.grad is not None),
        held,
        _nbytes(model.buffers()),
        sum(g.buffer.untyped_storage().nbytes() for s in states for g in s.unit.groups),
        _nbytes(t for p in sharded for t in _unreduced(p)),
        sorted(
            ((s.unit.name, sum(g.whole_nbytes for g in s.unit.groups)) for s in states),
            key=lambda unit: -unit[1],
        ),
    )


def _unreduced(p: object) -> list[Tensor]:
    whole = getattr(p, "whole", None)
    candidates = (getattr(p, "accumulated", None), None if whole is None else whole.grad)
    return [tensor for tensor in candidates if tensor is not None]


def _parameters(states: list[UnitState], model: nn.Module) -> list[Tensor]:
    whole = {id(p.whole) for state in states for p in state.unit.parameters}
    return [p for p in model.parameters() if id(p) not in whole]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        total += local.numel() * local.element_size()
    return total


def _optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 0
    return _nbytes(
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
