"""Training steps of data-parallel wrappers, timed on the ranks of a `pycoll.testing.RankPool`.

Contenders take turns, a few steps each, and each round goes through them in the other direction: what the machine does
meanwhile happens to all of them. Their ranks live through all rounds and sleep while it is not their turn.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.bench.engine import TorchPeers
from pycoll.bench.steps import ExposedCommunication, exposed_communication
from pycoll.testing import RankPool

WARMUP_STEPS = 4
WRAPPERS = {"torch": "torch DDP", "pycoll": "pycoll DDP", "fsdp2": "torch FSDP2"}


@dataclass(frozen=True)
class Contender:
    """A wrapper (one of `WRAPPERS`) over a backend of torch.distributed; only pycoll's own needs pycoll's."""

    wrapper: str
    backend: str

    def __str__(self) -> str:
        return f"{WRAPPERS[self.wrapper]} on {self.backend}"


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        make: the model, equal on all ranks.
        loss: of the wrapped model, on a batch that depends on the rank.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]


class _ManySmall(nn.Module):
    """2,000 parameters of 64 elements, each used once."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(64) for _ in range(2000)])

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for scale in self.scales:
            total = total * scale
        return total


def _wide() -> nn.Module:
    """16 MiB of gradients and little to compute: communication decides."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))


def _layers() -> nn.Module:
    """A deep and narrow stack: compute and communication of about the same size, the balanced model."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()) for _ in range(24)]
    return nn.Sequential(*blocks)


def _dense() -> nn.Module:
    """Few parameters that are used for many rows: computing decides."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(192, 192), nn.GELU()) for _ in range(8)))


def _batch(rows: int, columns: int, rank: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rank))


MODELS = {
    "wide": Model(_wide, lambda m, rank: m(_batch(2, 1024, rank)).square().mean()),
    "many": Model(_ManySmall, lambda m, rank: m(_batch(1, 64, rank)).square().mean()),
    "layers": Model(_layers, lambda m, rank: m(_batch(64, 256, rank)).square().mean()),
    "dense": Model(_dense, lambda m, rank: m(_batch(2048, 192, rank)).square().mean()),
}


def _data_parallel(model: nn.Module, wrapper: str, gradient_as_bucket_view: bool) -> nn.Module:
    wrap: Any = nn.parallel.DistributedDataParallel
    if wrapper == "pycoll":
        from pycoll.parallel.ddp import DistributedDataParallel

        wrap = DistributedDataParallel
    wrapped: nn.Module = wrap(model, gradient_as_bucket_view=gradient_as_bucket_view)
    return wrapped


def _fully_sharded(model: nn.Module) -> nn.Module:
    """torch's FSDP2, a unit for each child of the model that has parameters."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in model.children():
        if not isinstance(child, nn.ParameterList) and any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Stepper:
    """One training step of a wrapped model on this rank.

    A step without synchronisation is DDP's `no_sync`. FSDP2 has no such step that does the same work: there it is a
    step of the bare model, so what is exposed includes sharding's own work.
    """

    def __init__(self, model: str, wrapper: str, gradient_as_bucket_view: bool) -> None:
        import torch.distributed as dist

        self._rank, self._model = dist.get_rank(), MODELS[model]
        self._is_ddp = wrapper != "fsdp2"
        if self._is_ddp:
            self.wrapped: Any = _data_parallel(self._model.make(), wrapper, gradient_as_bucket_view)
            self._silent = self.wrapped
        else:
            self.wrapped, self._silent = _fully_sharded(self._model.make()), self._model.make()
        self._optimizers = {
            each: torch.optim.SGD(each.parameters(), lr=1e-6)
            for each in (self.wrapped, self._silent)
        }
        for _ in range(WARMUP_STEPS):
            self(True)

    def __call__(self, synchronise: bool) -> None:
        model = self.wrapped if synchronise else self._silent
        silent = self._is_ddp and not synchronise
        with self.wrapped.no_sync() if silent else contextlib.nullcontext():
            self._model.loss(model, self._rank).backward()
        self._optimizers[model].step()
        self._optimizers[model].zero_grad()


# Of this rank's process: steppers live through the rounds.
_steppers: dict[tuple[str, str, bool], Stepper] = {}


def measure_on_rank(
    model: str, wrapper: str, gradient_as_bucket_view: bool, pairs: int
) -> ExposedCommunication:
    """On a rank of a pool: `pairs` steps with and as many without synchronisation."""
    key = (model, wrapper, gradient_as_bucket_view)
    if key not in _steppers:
        _steppers[key] = Stepper(*key)
    _steppers[key](True)
    return exposed_communication(_steppers[key], TorchPeers(), pairs)


@dataclass(frozen=True)
class StepTimes:
    """Medians over rounds, of the slowest rank.

    Attributes:
        with_sync, without_sync: seconds of a step.
        ratios: how many times as fast a step with synchronisation was as that of the first contender of the same
            kind (DDP or FSDP2), a round each.
    """

    contender: Contender
    with_sync: float
    without_sync: float
    ratios: tuple[float, ...]

    @property
    def exposed(self) -> float:
        """Seconds by which synchronisation lengthens a step."""
        return self.with_sync - self.without_sync


def compare_wrappers(
    contenders: Sequence[Contender],
    model: str,
    *,
    world_size: int = 2,
    rounds: int = 5,
    pairs: int = 10,
    gradient_as_bucket_view: bool = False,
) -> list[StepTimes]:
    """Times of all contenders, which take turns; ratios are against the first of the same kind (DDP or FSDP2).

    Raises:
        ValueError: a contender or the model is unknown.
        pycoll.testing.RankError: ranks died, hung or raised.
    """
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}; known: {', '.join(MODELS)}")
    for contender in contenders:
        if contender.wrapper not in WRAPPERS:
            raise ValueError(f"unknown wrapper {contender.wrapper!r}; known: {', '.join(WRAPPERS)}")
    measured: dict[Contender, list[ExposedCommunication]] = {each: [] for each in contenders}
    with contextlib.ExitStack() as stack:
        backends = dict.fromkeys(contender.backend for contender in contenders)
        pools = {b: stack.enter_context(RankPool(world_size, b, timeout=300)) for b in backends}
        for number in range(rounds):
            for contender in contenders[:: -1 if number % 2 else 1]:
                arguments = (model, contender.wrapper, gradient_as_bucket_view, pairs)
                everyone = pools[contender.backend].run(measure_on_rank, *arguments)
                measured[contender].append(everyone[0])
    first: dict[bool, list[float]] = {}
    for contender, times in measured.items():
        first.setdefault(contender.wrapper == "fsdp2", [each.with_sync for each in times])
    return [
        StepTimes(
            contender,
            statistics.median(each.with_sync for each in times),
            statistics.median(each.without_sync for each in times),
            tuple(
                a / b.with_sync
                for a, b in zip(first[contender.wrapper == "fsdp2"], times, strict=True)
            ),
        )
        for contender, times in measured.items()
    ]
