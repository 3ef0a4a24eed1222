"""torch's own wrappers over pycoll give what one process gives."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pycoll.testing import RankPool

Pool = Callable[[int], RankPool]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(13, 31), nn.GELU(), nn.Linear(31, 17), nn.GELU(), nn.Linear(17, 3)
    )


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 13, generator=generator)


def train_alone(world_size: int, steps: int) -> nn.Module:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        x = torch.cat([batch(step, rank) for rank in range(world_size)])
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def assert_close_to_alone(parameters: list[torch.Tensor], steps: int) -> None:
    for mine, alone in zip(
        parameters, train_alone(dist.get_world_size(), steps).parameters(), strict=True
    ):
        torch.testing.assert_close(mine, alone.detach(), rtol=1e-4, atol=1e-5)


def train_ddp(hook: bool, static_graph: bool, steps: int = 4) -> bool:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(
        make_model(), bucket_cap_mb=0.001, static_graph=static_graph
    )
    if hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
    assert_close_to_alone([p.detach() for p in model.parameters()], steps)
    # Every rank holds the same bits.
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(flat, other) for other in everyone)


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("hook", [False, True])
def test_ddp(pool: Pool, hook: bool, static_graph: bool) -> None:
    for world_size in (1, 3):
        assert all(pool(world_size).run(train_ddp, hook, static_graph))


def train_fsdp2(steps: int = 4) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
    assert_close_to_alone([p.full_tensor().detach() for p in model.parameters()], steps)
    return True


def test_fsdp2(pool: Pool) -> None:
    for world_size in (1, 2):
        assert all(pool(world_size).run(train_fsdp2))


def zero_and_objects() -> bool:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
    assert_close_to_alone([p.detach() for p in model.parameters()], 4)
    objects: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rank": dist.get_rank(), "text": "x" * 1000 * dist.get_rank()})
    assert [o["rank"] for o in objects] == list(range(dist.get_world_size()))  # type: ignore[index]
    return True


def test_zero_optimizer_and_objects(pool: Pool) -> None:
    assert all(pool(2).run(zero_and_objects))


def profiled() -> list[str]:
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(100_003), async_op=True).wait()
        dist.barrier()
    return sorted({event.name for event in profile.events() if event.name.startswith("pycoll:")})


def test_profiler_ranges(pool: Pool) -> None:
    assert pool(2).run(profiled) == [["pycoll:all_reduce", "pycoll:barrier"]] * 2


def copies_of_a_wrapped_model() -> list[float]:
    first = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    grads = []
    for model in (first, copy.deepcopy(first)):
        (model(torch.ones(1, 2)) * (dist.get_rank() + 1)).sum().backward()
        grads.append(float(model.module.weight.grad[0, 0]))
    return grads


def test_deepcopy_of_a_wrapped_model(pool: Pool) -> None:
    assert pool(2).run(copies_of_a_wrapped_model) == [[1.5, 1.5]] * 2
