"""torch's own data-parallel wrappers over pycoll train as one process does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from small_model import (
    assert_close_to_alone,
    equal_on_all_ranks,
    make_model,
    make_optimizer,
    train,
)
from torch import nn

from pycoll.testing import RankPool

Pool = Callable[[int], RankPool]

STEPS = 4


def train_ddp(hook: bool, static_graph: bool) -> bool:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(
        make_model(), bucket_cap_mb=0.001, static_graph=static_graph
    )
    if hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(model, make_optimizer(model.parameters()), STEPS)
    assert_close_to_alone(model.parameters(), STEPS)
    return equal_on_all_ranks(model.parameters())


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("hook", [False, True])
def test_ddp(pool: Pool, hook: bool, static_graph: bool) -> None:
    for world_size in (1, 3):
        assert all(pool(world_size).run(train_ddp, hook, static_graph))


def train_fsdp2() -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, make_optimizer(model.parameters()), STEPS)
    assert_close_to_alone([p.full_tensor() for p in model.parameters()], STEPS)
    return True


def test_fsdp2(pool: Pool) -> None:
    for world_size in (1, 2):
        assert all(pool(world_size).run(train_fsdp2))


def train_zero(bucket_view: bool) -> bool:
    """Optimizer states are divided among ranks, and put together again for a checkpoint."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=bucket_view, lr=1e-2
    )
    train(model, optimizer, STEPS)
    assert_close_to_alone(model.parameters(), STEPS)
    optimizer.consolidate_state_dict(to=last)
    if rank == last:
        alone = make_model()
        local = make_optimizer(alone.parameters())
        local.load_state_dict(optimizer.state_dict())
        assert len(local.state) == len(list(alone.parameters()))
    return equal_on_all_ranks(model.parameters())


@pytest.mark.parametrize("bucket_view", [False, True])
def test_zero_optimizer(pool: Pool, bucket_view: bool) -> None:
    for world_size in (2, 3):
        assert all(pool(world_size).run(train_zero, bucket_view))


def profiled() -> list[str]:
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(100_003), async_op=True).wait()
        dist.barrier()
    return sorted({event.name for event in profile.events() if event.name.startswith("pycoll:")})


def test_profiler_ranges(pool: Pool) -> None:
    assert pool(2).run(profiled) == [["pycoll:all_reduce", "pycoll:barrier"]] * 2
