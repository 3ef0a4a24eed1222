"""FullyShardedDataParallel, the front of fully_shard: its units and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from test_fsdp import WIDTH, Block, Network, Run, loss_of, rows, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import pycoll
from pycoll.parallel.fsdp.schedule import state_of
from pycoll.testing import RankPool

pytestmark = pytest.mark.slow

Pools = Callable[[int], RankPool]


def wraps_in_one_call(policy: Any, strategy: Any, units: int) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, n // 2)) if "HYBRID" in str(strategy) else None
    plain: Any = Network()
    shard(plain, Run())
    model = pycoll.FullyShardedDataParallel(
        Network(),
        sharding_strategy=strategy,
        auto_wrap_policy=policy,
        device_mesh=mesh,
        sync_module_states=True,
        forward_prefetch=True,
    )
    assert sum(state_of(m) is not None for m in model.modules()) == units
    assert list(model.state_dict()) == list(plain.state_dict())
    with model.no_sync():
        loss_of(model(rows(1, rank))).backward()
        assert all(p.grad is None for p in model.parameters())
    loss_of(model(rows(2, rank))).backward()
    plain.set_requires_gradient_sync(False)
    loss_of(plain(rows(1, rank))).backward()
    plain.set_requires_gradient_sync(True)
    loss_of(plain(rows(2, rank))).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad.full_tensor(), q.grad.full_tensor(), atol=1e-6)
    assert model.clip_grad_norm_(1.0).item() == pytest.approx(
        pycoll.clip_grad_norm_(plain.parameters(), 1.0).item(), rel=1e-5
    )
    with pycoll.FullyShardedDataParallel.summon_full_params(model):
        assert model.module.first.weight.shape == (WIDTH, WIDTH)
        assert type(model.module.first.weight) is nn.Parameter
    assert isinstance(model.module.first.weight, DTensor)


def test_the_front(pool: Pools) -> None:
    pool(2).run(wraps_in_one_call, {Block}, None, 4)
    pool(2).run(
        wraps_in_one_call, ModuleWrapPolicy({Block}), pycoll.ShardingStrategy.SHARD_GRAD_OP, 4
    )
    pool(2).run(wraps_in_one_call, None, "FULL_SHARD", 1)
    pool(4).run(wraps_in_one_call, {Block}, "HYBRID_SHARD", 4)


def front_as_torch_has_it() -> None:
    """torch's enumerations and policies, in the order of its arguments; a meta model that a function initialises."""
    made: list[str] = []

    def initialise(module: nn.Module) -> None:
        made.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for p in module.parameters(recurse=False):
                p.copy_(torch.arange(p.numel()).view_as(p) / p.numel())

    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(13, 11), nn.ReLU(), nn.Linear(11, 5), nn.Linear(5, 3))
    plain[3] = nn.Linear(5, 3)
    alone = plain[3].weight
    bf16 = torch_fsdp.MixedPrecision(torch.bfloat16, torch.float32)
    model = pycoll.FullyShardedDataParallel(
        plain,
        None,
        torch_fsdp.ShardingStrategy.SHARD_GRAD_OP,
        torch_fsdp.CPUOffload(offload_params=True),
        ModuleWrapPolicy({nn.Linear}),
        None,
        bf16,
        None,
        initialise,
        torch.device("cpu"),
        ignored_states=[alone],
    )
    assert made == ["Linear", "Linear"]
    assert type(model.module[3].weight) is nn.Parameter
    assert model.module[3].weight is alone
    assert isinstance(model.module[3].bias, DTensor)
    weight = model.module[0].weight.full_tensor()
    assert torch.equal(weight, torch.arange(143).view(11, 13) / 143)
    states = [s for m in model.modules() if (s := state_of(m)) is not None]
    assert [s.backward_prefetch for s in states] == [[]] * 4
    assert {s.reshards_after_forward for s in states} == {False}
    hidden = model.module[2](model.module[1](model.module[0](torch.ones(2, 13))))
    assert hidden.dtype == torch.bfloat16
    policy = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    one = pycoll.fully_shard(nn.Linear(3, 2), mp_policy=policy)
    assert one(torch.ones(1, 3)).dtype == torch.float64


def test_the_front_takes_what_torch_takes(pool: Pools) -> None:
    pool(2).run(front_as_torch_has_it)


def wrong_fronts() -> None:
    for how, words in (
        ({"use_orig_params": False}, "use_orig_params is False"),
        ({"device_id": 0}, "device_id is 0"),
        (
            {"mixed_precision": torch_fsdp.MixedPrecision(buffer_dtype=torch.float16)},
            "buffer_dtype is torch.float16",
        ),
        ({"sharding_strategy": "NO_SHARD"}, "use DistributedDataParallel"),
        ({"sharding_strategy": "SOME"}, "sharding_strategy is 'SOME'; give one of FULL_SHARD"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "needs a device_mesh"),
    ):
        with pytest.raises(ValueError, match=words):
            pycoll.FullyShardedDataParallel(Block(), **how)
    for how, words in (
        ({"mixed_precision": torch.float16}, "mixed_precision is a dtype; pass"),
        ({"cpu_offload": True}, "cpu_offload is a bool; pass"),
        ({"ignored_states": ["first"]}, "ignored_states has a str"),
    ):
        with pytest.raises(TypeError, match=words):
            pycoll.FullyShardedDataParallel(Block(), **how)


def test_wrong_arguments_of_the_front(pool: Pools) -> None:
    pool(1).run(wrong_fronts)
