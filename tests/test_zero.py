"""ZeroRedundancyOptimizer trains bit for bit as the optimizer that it wraps, with its state in parts."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_model import batch, equal_on_all_ranks, loss_of, make_model
from torch import Tensor, nn

import pycoll
from pycoll.parallel.zero import partition
from pycoll.testing import RankPool, report_progress

pytestmark = pytest.mark.slow

Pools = Callable[[int], RankPool]

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.05}),
]
STEPS = 4


def test_partition_by_bytes() -> None:
    assert partition([40, 400, 40, 320, 40], 2) == [1, 0, 1, 1, 0]
    assert partition([8], 3) == [0]
    assert partition([8, 8, 8], 3) == [0, 1, 2]
    owners = partition([(i * 37) % 101 + 1 for i in range(97)], 4)
    loads = [sum((i * 37) % 101 + 1 for i in range(97) if owners[i] == r) for r in range(4)]
    assert max(loads) - min(loads) <= 101


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.003}]


def step_all(
    model: nn.Module, optimizers: Sequence[Any], scheduler: Any, steps: Sequence[int]
) -> None:
    for step in steps:
        model.zero_grad()
        loss_of(model, batch(step, dist.get_rank())).backward()
        for optimizer in optimizers:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()


def train_both(as_view: bool, overlap: bool, grad_view: bool) -> bool:
    """Each optimizer, sharded and whole, on the same gradients."""
    for kind, defaults in OPTIMIZERS:
        for grouped in (False, True):
            report_progress(f"{kind.__name__} {grouped}")
            models = [make_model(), make_model()]
            wrapped = [
                pycoll.DistributedDataParallel(
                    m, bucket_cap_mb=1e-3, gradient_as_bucket_view=grad_view
                )
                for m in models
            ]
            whole_params, params = (
                groups_of(m) if grouped else list(m.parameters()) for m in models
            )
            whole = kind(whole_params, **defaults)
            sharded = pycoll.ZeroRedundancyOptimizer(
                params,
                kind,
                parameters_as_bucket_view=as_view,
                overlap_with_ddp=overlap,
                **defaults,
            )
            if overlap:
                sharded.overlap(wrapped[1])
            for ddp, optimizer in zip(wrapped, (whole, sharded), strict=True):
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
                step_all(ddp, [optimizer], scheduler, range(STEPS))
            for mine, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
                assert torch.equal(mine, expected), (kind, grouped)
            mine = sum(p.numel() for g in sharded.optim.param_groups for p in g["params"])
            assert len(sharded.optim.state) < len(list(models[1].parameters()))
            assert 0 < mine < sum(p.numel() for p in models[1].parameters())
            assert equal_on_all_ranks(models[1].parameters())
    return True


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("as_view", [False, True])
def test_training(pool: Pools, as_view: bool, overlap: bool) -> None:
    for world_size in (2, 3):
        assert all(pool(world_size).run(train_both, as_view, overlap, as_view))


def fewer_parameters_than_ranks() -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    ddp = pycoll.DistributedDataParallel(model)
    optimizer = pycoll.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.25)
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
        optimizer.step()
        seen.append(round(model.weight.item(), 5))
    optimizer.consolidate_state_dict(to=2)
    if dist.get_rank() == 2:
        state = optimizer.state_dict()
        assert list(state["state"]) == [0]
        assert float(state["state"][0]["step"]) == 2.0
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    return seen


def test_fewer_parameters_than_ranks(pool: Pools) -> None:
    assert pool(3).run(fewer_parameters_than_ranks) == [[0.75, 0.5]] * 3


# --- checkpoints -----------------------------------------------------------------------------------


def mixed_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 3), nn.Linear(3, 2).double())
    model.register_parameter("scalar", nn.Parameter(torch.tensor(2.0)))
    return model


def gradients(model: nn.Module, step: int) -> None:
    """Equal on all ranks and for any number of ranks: what is compared is the optimizer."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def train_and_save(
    kind: type[torch.optim.Optimizer], defaults: dict[str, Any], grouped: bool
) -> Any:
    model = mixed_model()
    params: Any = groups_of(model)[:2] if grouped else model.parameters()
    if grouped:
        params[1]["params"].append(model.scalar)
    optimizer = pycoll.ZeroRedundancyOptimizer(params, kind, **defaults)
    for step in range(3):
        gradients(model, step)
        optimizer.step()
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        return model.state_dict(), optimizer.state_dict()
    return None


def load_and_train(
    saved: Any, kind: type[torch.optim.Optimizer], defaults: dict[str, Any], grouped: bool
) -> Any:
    model = mixed_model()
    model.load_state_dict(saved[0])
    params: Any = groups_of(model) if grouped else model.parameters()
    if grouped:
        params[1]["params"].append(model.scalar)
    optimizer = pycoll.ZeroRedundancyOptimizer(params, kind, **defaults)
    optimizer.load_state_dict(saved[1])
    for step in range(3, 6):
        gradients(model, step)
        optimizer.step()
    optimizer.consolidate_state_dict(to=dist.get_world_size() - 1)
    if dist.get_rank() == dist.get_world_size() - 1:
        return [p.detach() for p in model.parameters()], optimizer.state_dict()
    return None


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("grouped", [False, True])
def test_state_goes_to_another_number_of_ranks(pool: Pools, grouped: bool) -> None:
    """Saved on 3 ranks, loaded on 2, on 4 and by the unwrapped optimizer: equal bits in weights and state."""
    for kind, defaults in OPTIMIZERS:
        saved = pool(3).run(train_and_save, kind, defaults, grouped)[0]
        alone = mixed_model()
        alone.load_state_dict(saved[0])
        params: Any = groups_of(alone) if grouped else alone.parameters()
        if grouped:
            params[1]["params"].append(alone.scalar)
        whole = kind(params, **defaults)
        whole.load_state_dict(copy.deepcopy(saved[1]))  # it would be trained on
        for step in range(3, 6):
            gradients(alone, step)
            whole.step()
        expected = whole.state_dict()
        for world_size in (2, 4):
            weights, state = pool(world_size).run(load_and_train, saved, kind, defaults, grouped)[
                -1
            ]
            assert all(map(torch.equal, weights, alone.parameters()))
            assert same(dict(state["state"]), dict(expected["state"]))
            for mine, theirs in zip(state["param_groups"], expected["param_groups"], strict=True):
                assert same(mine, theirs)


# --- groups that come later, errors, uneven inputs -------------------------------------------------


def add_a_group() -> bool:
    models = [make_model(), make_model()]
    optimizers = []
    for m, sharded in zip(models, (False, True), strict=True):
        first, *rest = m.parameters()
        if sharded:
            optimizer: Any = pycoll.ZeroRedundancyOptimizer([first], torch.optim.AdamW, lr=0.01)
        else:
            optimizer = torch.optim.AdamW([first], lr=0.01)
        gradients(m, 0)
        optimizer.step()
        optimizer.add_param_group({"params": rest, "lr": 0.1})
        for step in range(1, 3):
            gradients(m, step)
            optimizer.step()
        optimizers.append(optimizer)
    owned = [len(g["params"]) for g in optimizers[1].optim.param_groups]
    assert sum(owned) < len(list(models[1].parameters()))
    return all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_a_group_that_comes_later(pool: Pools) -> None:
    assert all(pool(2).run(add_a_group))


def errors() -> list[str]:
    texts = []
    rank = dist.get_rank()
    for params in ([], [nn.Parameter(torch.ones(2 + rank))]):
        try:
            pycoll.ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
        except (ValueError, RuntimeError) as error:
            texts.append(str(error))
    optimizer = pycoll.ZeroRedundancyOptimizer(
        [nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=0.1
    )
    with pytest.raises(RuntimeError, match="overlap_with_ddp=True"):
        optimizer.overlap(None)
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
    return texts


def test_errors(pool: Pools) -> None:
    for texts in pool(2).run(errors):
        assert "empty" in texts[0]
        assert "(3,)" in texts[1]
        assert "(2,)" in texts[1]


def uneven() -> tuple[list[float], bool]:
    from torch.distributed.algorithms.join import Join

    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    ddp = pycoll.DistributedDataParallel(model)
    optimizer = pycoll.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.5)
    with Join([ddp, optimizer]):
        for _ in range(1 + 2 * rank):
            optimizer.zero_grad()
            ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
            optimizer.step()
    return [p.item() for p in model.parameters()], equal_on_all_ranks(ddp.parameters())


def test_uneven_inputs(pool: Pools) -> None:
    # w, v = 1, 1: gradients (1 + 2)/2; then rank 1 alone, halved: 2 v / 2.
    w = v = 1.0
    for total in (3.0, 2.0, 2.0):
        w, v = w - 0.5 * total / 2 * v, v - 0.5 * total / 2 * w
    assert pool(2).run(uneven) == [([w, v], True)] * 2


# --- copies ----------------------------------------------------------------------------------------


def repickled(value: Any) -> Any:
    held = io.BytesIO()
    torch.save(value, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


def copies_train_on(as_view: bool) -> None:
    for duplicate in (copy.deepcopy, repickled):
        ddp = pycoll.DistributedDataParallel(make_model())
        optimizer = pycoll.ZeroRedundancyOptimizer(
            groups_of(ddp), torch.optim.AdamW, parameters_as_bucket_view=as_view, lr=0.01
        )
        step_all(ddp, [optimizer], None, [0, 1])
        ddp2, optimizer2 = duplicate((ddp, optimizer))
        assert optimizer2.param_groups[0]["params"][0] is next(ddp2.parameters())
        step_all(ddp, [optimizer], None, [2, 3])
        before = [p.clone() for p in ddp2.parameters()]
        assert not torch.equal(before[0], next(ddp.parameters()))  # memory of its own
        step_all(ddp2, [optimizer2], None, [2, 3])
        for p, q in zip(ddp.parameters(), ddp2.parameters(), strict=True):
            assert torch.equal(p, q)
        assert equal_on_all_ranks(list(ddp2.parameters()))
    wrong = optimizer.__getstate__()
    wrong["kept"]["world_size"] += 1
    with pytest.raises(RuntimeError, match=r"pickle of rank [01] of 3, with its part"):
        type(optimizer).__new__(type(optimizer)).__setstate__(wrong)


@pytest.mark.parametrize("as_view", [False, True])
def test_copies_of_optimizers(pool: Pools, as_view: bool) -> None:
    pool(2).run(copies_train_on, as_view)
