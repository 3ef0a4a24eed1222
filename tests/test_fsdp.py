"""Sharded models train as one process does on the joined batch, and with the bits of DistributedDataParallel."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import pycoll
from pycoll.testing import RankPool, report_progress

pytestmark = pytest.mark.slow

Pools = Callable[[int], RankPool]

STEPS = 3
WIDTH = 13
BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 29)
        self.norm = nn.LayerNorm(29)
        self.down = nn.Linear(29, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Network(nn.Module):
    """Blocks, one of them used twice; `out` has `first`'s weight; `scale` has fewer rows than there are ranks."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.checkpointing = checkpointing
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[1]):
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.out(x) * self.scale


@dataclass(frozen=True)
class Run:
    """How a model is sharded and trained.

    Attributes:
        reshard: reshard_after_forward.
        units: "blocks" and the root, or "one".
        accumulation: micro-batches a step; synced: all of them reduce, else the last.
        prefetch: "default", "explicit" or "none".
        bf16: computes in bfloat16, reduces in float32.
        hybrid: two replicas of a sharding group.
        delays: random pauses before collectives.
    """

    reshard: Any = True
    units: str = "blocks"
    accumulation: int = 1
    synced: bool = False
    checkpointing: str = "none"
    prefetch: str = "default"
    bf16: bool = False
    hybrid: bool = False
    delays: bool = False


def rows(number: int, rank: int) -> Tensor:
    """(7, 13), of this rank and micro-batch."""
    return torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1009 * number + rank))


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def shard(model: Network, run: Run) -> None:
    mesh = None
    if run.hybrid:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    how: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": run.reshard}
    if run.bf16:
        how["mp_policy"] = pycoll.MixedPrecisionPolicy(BF16, FP32)
    blocks: Any = model.blocks if run.units == "blocks" else []
    for block in blocks:
        pycoll.fully_shard(block, **how)
    pycoll.fully_shard(model, **how)
    if run.prefetch != "default":
        explicit = run.prefetch == "explicit"
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(list(blocks[i + 1 : i + 3]) if explicit else [])
            before = list(reversed(blocks[max(0, i - 2) : i]))
            block.set_modules_to_backward_prefetch(before if explicit else [])


def pause(_: Any) -> None:
    time.sleep(random.random() * 0.003)


def train_sharded(run: Run) -> list[str]:
    """What differs from one process, and from DistributedDataParallel (bit for bit, where that can be)."""
    rank, world_size, wrong = dist.get_rank(), dist.get_world_size(), []
    model, alone = Network(run.checkpointing), Network()
    replicated = pycoll.DistributedDataParallel(Network(run.checkpointing))
    shard(model, run)
    if run.delays:
        random.seed(rank)
        for module in model.modules():
            module.register_forward_pre_hook(lambda m, a: pause(None))
            module.register_full_backward_hook(lambda m, a, b: pause(None))
    models = (model, replicated, alone)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    # Two reductions of parts of a gradient round otherwise than one of their sum: so it is with micro-batches that all
    # reduce, and with a block in two reentrant checkpoints.
    exact = not (run.bf16 or run.hybrid or (run.accumulation > 1 and run.synced))
    exact &= run.checkpointing != "reentrant"
    rtol, atol = (5e-2, 1e-2) if run.bf16 else (1e-4, 1e-5)
    for step in range(STEPS):
        for part in range(run.accumulation):
            number = step * run.accumulation + part
            syncs = run.synced or part == run.accumulation - 1
            model.set_requires_gradient_sync(syncs)
            loss_of(model(rows(number, rank))).backward()
            replicated.require_backward_grad_sync = syncs
            loss_of(replicated(rows(number, rank))).backward()
            loss_of(alone(torch.cat([rows(number, r) for r in range(world_size)]))).backward()
        named = zip(
            model.named_parameters(), replicated.parameters(), alone.parameters(), strict=True
        )
        for (name, p), q, one in named:
            grad = p.grad.full_tensor()
            if exact and not torch.equal(grad, q.grad):
                wrong.append(f"step {step}, {name}: bits {(grad - q.grad).abs().max():.1e}")
            if not torch.allclose(grad, one.grad, rtol=rtol, atol=atol):
                wrong.append(f"step {step}, {name}: {(grad - one.grad).abs().max():.1e}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if run.bf16:
            with torch.no_grad():
                for p, one in zip(model.parameters(), alone.parameters(), strict=True):
                    one.copy_(p.full_tensor())
    for p, q in zip(model.parameters(), replicated.parameters(), strict=True):
        if exact and not torch.equal(p.full_tensor(), q):
            wrong.append("weights")
    assert model.out.weight is model.first.weight
    return wrong


def every_run(world_size: int) -> list[Run]:
    runs = [
        Run(reshard, units, accumulation, synced, checkpointing, prefetch, bf16)
        for reshard in (True, False)
        for units in ("blocks", "one")
        for accumulation, synced in ((1, False), (2, True), (3, False))
        for checkpointing in ("none", "reentrant", "non-reentrant")
        for prefetch in ("default", "explicit", "none")
        for bf16 in (False, True)
    ]
    if world_size == 4:
        runs += [
            Run(2, u, a, False, c)
            for u in ("blocks", "one")
            for a in (1, 2)
            for c in ("none", "non-reentrant")
        ]
        runs += [
            Run(r, "blocks", a, s, hybrid=True)
            for r in (True, False)
            for a, s in ((1, False), (2, True), (2, False))
        ]
    return runs


def a_few(world_size: int) -> list[Run]:
    """Every value of every attribute, by turns."""
    runs = every_run(world_size)
    few = runs[:: len(runs) // 6 - 1] if world_size != 4 else runs[-14::3]
    return [*few, Run(delays=True), Run(False, delays=True, checkpointing="non-reentrant")]


def train_all(chosen: list[Run]) -> dict[str, list[str]]:
    wrong = {}
    for run in chosen:
        report_progress(str(run))
        if found := train_sharded(run):
            wrong[str(run)] = found
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training(pool: Pools, world_size: int) -> None:
    for found in pool(world_size).run(train_all, a_few(world_size)):
        assert not found


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_in_every_way(pool: Pools, world_size: int) -> None:
    runs = every_run(world_size)
    for begin in range(0, len(runs), 8):
        for found in pool(world_size).run(train_all, runs[begin : begin + 8]):
            assert not found
