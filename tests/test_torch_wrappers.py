"""More of torch that stands on collectives: comm hooks, FSDP, DTensor, checkpoints, pipelines, tensor parallel.

What DDP, FSDP2 and the sharded optimizer train is compared in `test_training`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checker import assert_same_bits
from small_model import (
    assert_close_to_alone,
    batch,
    equal_on_all_ranks,
    loss_of,
    make_model,
    make_optimizer,
    train,
)
from torch import Tensor, nn

from pycoll.testing import RankPool

pytestmark = pytest.mark.slow

Pools = Callable[[int], RankPool]

STEPS = 4


# --- on ranks --------------------------------------------------------------------------------------


def mean_gradients() -> list[Tensor]:
    """Of one backward pass over the first batches of all ranks."""
    model = make_model()
    x = torch.cat([batch(0, rank) for rank in range(dist.get_world_size())])
    loss_of(model, x).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def gradients_by_hook(name: str, tolerance: float) -> bool:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

    model = nn.parallel.DistributedDataParallel(make_model())
    # No matrix has more rows: an approximation of that rank leaves nothing out.
    state = power_sgd.PowerSGDState(
        None, matrix_approximation_rank=31, start_powerSGD_iter=2, min_compression_rate=0.01
    )
    hook, hook_state = {
        "allreduce": (default_hooks.allreduce_hook, None),
        "fp16_compress": (default_hooks.fp16_compress_hook, None),
        # By its own name torch lets it be registered over NCCL only.
        "bf16_compress": (
            lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket),
            None,
        ),
        "power_sgd": (power_sgd.powerSGD_hook, state),
    }[name]
    model.register_comm_hook(hook_state, hook)
    for _ in range(4):  # PowerSGD begins with the third pass
        model.zero_grad()
        if dist.get_rank() == 1:
            time.sleep(0.1)  # the other rank has to wait for its gradients
        loss_of(model, batch(0, dist.get_rank())).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for mine, expected in zip(gradients, mean_gradients(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance * 0.01)
    return equal_on_all_ranks(gradients)


def train_compiled_ddp() -> bool:
    model = nn.parallel.DistributedDataParallel(make_model())
    train(torch.compile(model, backend="aot_eager"), make_optimizer(model.parameters()), STEPS)
    assert_close_to_alone(model.parameters(), STEPS)
    return equal_on_all_ranks(model.parameters())


def train_fsdp1(strategy: str) -> bool:
    from torch.distributed import fsdp

    how: dict[str, Any] = {
        "sharding_strategy": fsdp.ShardingStrategy[strategy],
        "device_id": torch.device("cpu"),
        "use_orig_params": True,
    }
    model = make_model()
    for index in (0, 2, 4):
        model[index] = fsdp.FullyShardedDataParallel(model[index], **how)
    model = fsdp.FullyShardedDataParallel(model, **how)
    train(model, make_optimizer(model.parameters()), STEPS)
    with fsdp.FullyShardedDataParallel.summon_full_params(model):
        parameters = [p.detach().clone() for p in model.parameters()]
    assert_close_to_alone(parameters, STEPS)
    return equal_on_all_ranks(parameters)


def fully_sharded(mesh: Any = None, **how: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def train_fsdp2_on_a_grid() -> bool:
    """Sharded along one dim of a mesh and replicated along the other."""
    from torch.distributed.device_mesh import init_device_mesh

    model = fully_sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    train(model, make_optimizer(model.parameters()), STEPS)
    full = [p.full_tensor() for p in model.parameters()]
    assert_close_to_alone(full, STEPS)
    return equal_on_all_ranks(full)


def scale_gradients_before_they_are_added(force_sum: bool) -> bool:
    """With another divisor than the number of ranks, for which torch would use PREMUL_SUM if it may."""
    from torch.distributed.fsdp import FSDPModule

    model = fully_sharded()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(5.0)
            module.set_force_sum_reduction_for_comms(force_sum)
    loss_of(model, batch(0, dist.get_rank())).backward()
    for p, mean in zip(model.parameters(), mean_gradients(), strict=True):
        assert p.grad is not None
        scaled = mean * dist.get_world_size() / 5
        torch.testing.assert_close(p.grad.full_tensor(), scaled, rtol=1e-4, atol=1e-6)
    return True


def mixed_precision() -> bool:
    """Parameters and activations in bfloat16, gradients reduced in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_sharded(mp_policy=policy)
    loss_of(model, batch(0, dist.get_rank())).backward()
    for p, mean in zip(model.parameters(), mean_gradients(), strict=True):
        assert p.grad is not None
        gradient = p.grad.full_tensor()
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, mean, rtol=0.1, atol=0.01)
    return True


def save_checkpoint(path: str) -> list[float]:
    """Returns sums of the parameters, for those who load it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = fully_sharded()
    optimizer = make_optimizer(model.parameters())
    train(model, optimizer, 2)
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=path)
    return [p.full_tensor().double().sum().item() for p in model.parameters()]


def load_checkpoint(path: str) -> list[float]:
    """Perhaps on another number of ranks than have saved it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = fully_sharded()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = make_optimizer(model.parameters())
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    sums = [p.full_tensor().double().sum().item() for p in model.parameters()]
    train(model, optimizer, 1)
    assert all(state["step"] == 3 for state in optimizer.state.values())
    return sums


def redistribute_between_all_placements() -> int:
    """Uneven shards of a tensor, from every placement to every other; the number of ways."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,))
    whole = torch.arange(7.0 * 5).reshape(7, 5)
    ways = 0
    placements = [Shard(0), Shard(1), Replicate()]
    for source, target in itertools.product(placements, placements):
        moved = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
        assert_same_bits(moved.full_tensor(), whole, f"{source} to {target}")
        ways += 1
    from torch.distributed.tensor import DTensor

    for op, scale in (("sum", n * (n + 1) / 2), ("avg", (n + 1) / 2), ("max", n)):
        local = whole * (dist.get_rank() + 1)
        for target in placements:
            partial = DTensor.from_local(local, mesh, [Partial(op)])
            moved = partial.redistribute(mesh, [target])
            assert_same_bits(moved.full_tensor(), whole * scale, f"partial {op} to {target}")
            ways += 1
    return ways


def multiply_on_a_grid() -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    a, b = torch.arange(35.0).reshape(7, 5), torch.arange(15.0).reshape(5, 3)
    layouts = list(itertools.product([Shard(0), Shard(1), Replicate()], repeat=2))
    for of_a, of_b in itertools.product(layouts, layouts):
        product = distribute_tensor(a, mesh, of_a) @ distribute_tensor(b, mesh, of_b)
        assert_same_bits(product.full_tensor(), a @ b, f"{of_a} {of_b}")
    return True


def tensor_parallel() -> bool:
    """Columns of the first layer and rows of the second; the whole is the layer that one rank has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    n = dist.get_world_size()
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 4 * n), nn.GELU(), nn.Linear(4 * n, 5))
    torch.manual_seed(0)
    parallel = nn.Sequential(nn.Linear(6, 4 * n), nn.GELU(), nn.Linear(4 * n, 5))
    mesh = init_device_mesh("cpu", (n,))
    parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(3, 6)
    y, expected = parallel(x), alone(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    expected.square().sum().backward()
    for p, q in zip(parallel.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5)
    return True


def run_pipeline(schedule_name: str) -> bool:
    """Two stages, on as many ranks; losses and gradients are those of the whole model."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as of_torch

    rank, num_microbatches = dist.get_rank(), 4
    halves = [nn.Sequential(*list(make_model())[:2]), nn.Sequential(*list(make_model())[2:])]
    stage = PipelineStage(halves[rank], rank, 2, torch.device("cpu"))
    x, target = batch(0, 0), torch.ones(8, 3)
    schedule = getattr(of_torch, schedule_name)(
        stage, num_microbatches, loss_fn=nn.functional.mse_loss
    )
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target, losses=losses)
    whole = make_model()
    expected = [
        nn.functional.mse_loss(whole(part), torch.ones_like(goal))
        for part, goal in zip(
            x.chunk(num_microbatches), target.chunk(num_microbatches), strict=True
        )
    ]
    (torch.stack(expected).sum() / num_microbatches).backward()
    if rank == 1:
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
    mine = list(whole)[:2] if rank == 0 else list(whole)[2:]
    reference = nn.Sequential(*mine)
    for p, q in zip(halves[rank].parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    return True


# --- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("allreduce", 1e-5),
        ("fp16_compress", 2e-3),
        ("bf16_compress", 2e-2),
        ("power_sgd", 1e-3),
    ],
)
def test_gradients_by_comm_hooks(pool: Pools, name: str, tolerance: float) -> None:
    assert all(pool(2).run(gradients_by_hook, name, tolerance, timeout=20))


def test_compiled_ddp(pool: Pools) -> None:
    assert all(pool(2).run(train_compiled_ddp))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1(pool: Pools, strategy: str) -> None:
    assert all(pool(2).run(train_fsdp1, strategy))


def test_fsdp2_on_a_grid_of_ranks(pool: Pools) -> None:
    assert all(pool(4).run(train_fsdp2_on_a_grid))


@pytest.mark.parametrize("force_sum", [False, True])
def test_fsdp2_with_a_divisor_of_its_own(pool: Pools, force_sum: bool) -> None:
    assert all(pool(2).run(scale_gradients_before_they_are_added, force_sum))


def test_fsdp2_in_mixed_precision(pool: Pools) -> None:
    assert all(pool(3).run(mixed_precision))


@pytest.mark.parametrize(("saving", "loading"), [(2, 2), (3, 2), (2, 4)])
def test_checkpoints_are_loaded_on_other_numbers_of_ranks(
    pool: Pools, saving: int, loading: int, tmp_path: Path
) -> None:
    saved = pool(saving).run(save_checkpoint, str(tmp_path))
    loaded = pool(loading).run(load_checkpoint, str(tmp_path))
    assert saved == [saved[0]] * saving
    assert loaded == [saved[0]] * loading


@pytest.mark.parametrize("world_size", [2, 3])
def test_dtensors_between_all_placements(pool: Pools, world_size: int) -> None:
    assert pool(world_size).run(redistribute_between_all_placements) == [18] * world_size


def test_dtensors_on_a_grid_are_multiplied(pool: Pools) -> None:
    assert all(pool(4).run(multiply_on_a_grid))


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensor_parallel_layers(pool: Pools, world_size: int) -> None:
    assert all(pool(world_size).run(tensor_parallel))


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipelines(pool: Pools, schedule: str) -> None:
    assert all(pool(2).run(run_pipeline, schedule))
