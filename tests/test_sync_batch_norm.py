"""SyncBatchNorm gives what batch normalisation of the joined batch gives, however the samples are divided."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pycoll
from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]
CHANNELS = 3
# Samples of each rank.
DIVISIONS = ([1, 1], [0, 2], [3, 1], [2, 0], [5, 2])


def samples(number: int, spatial: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(number, CHANNELS, *spatial, generator=generator, dtype=torch.float64)
    return (x * torch.arange(1, CHANNELS + 1).view(1, -1, *[1] * len(spatial)) + 5).to(dtype)


def weights_of_loss(x: Tensor) -> Tensor:
    """So that the gradient of every output differs."""
    return torch.linspace(-1, 2, x.numel(), dtype=torch.float64).view(x.shape).to(x.dtype)


def make_norm(kind: type[nn.Module], **how: Any) -> Any:
    norm: Any = kind(CHANNELS, **how)
    if norm.weight is not None:
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([1.0, -2.0, 0.5]))
            if norm.bias is not None:
                norm.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    return norm


def results_of(norm: Any, x: Tensor, loss_weights: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    output = norm(x)
    (output * loss_weights).sum().backward()
    assert x.grad is not None
    found = {"output": output.detach(), "input": x.grad}
    for name in ("weight", "bias"):
        if getattr(norm, name, None) is not None:
            found[name] = getattr(norm, name).grad
    return {**found, **{name: b.clone() for name, b in norm.named_buffers()}}


def run_divided(
    division: list[int], spatial: list[int], dtype: torch.dtype, how: dict[str, Any]
) -> Any:
    torch.set_default_dtype(torch.float32)
    x = samples(sum(division), spatial, dtype)
    begin = sum(division[: dist.get_rank()])
    mine = slice(begin, begin + division[dist.get_rank()])
    norm = make_norm(pycoll.SyncBatchNorm, **how)
    if dtype is torch.float64:
        norm = norm.double()
    norm(x[mine])  # two steps: running statistics have a history
    return results_of(norm, x[mine], weights_of_loss(x)[mine])


def run_joined(
    division: list[int], spatial: list[int], dtype: torch.dtype, how: dict[str, Any]
) -> Any:
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[
        len(spatial)
    ]
    x = samples(sum(division), spatial, dtype)
    norm = make_norm(kind, **how)
    if dtype is torch.float64:
        norm = norm.double()
    norm(x)
    return results_of(norm, x, weights_of_loss(x))


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
)
RUNS = list(itertools.product(DIVISIONS, ([], [5], [2, 3]), (torch.float32, torch.float64), WAYS))


def run_all_divided() -> list[dict[str, Tensor]]:
    return [run_divided(*run) for run in RUNS]


def test_like_the_joined_batch(pool: Pools) -> None:
    for run, *parts in zip(RUNS, *pool(2).run(run_all_divided), strict=True):
        expected = run_joined(*run)
        close: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-5, "msg": str(run)}
        for name in ("output", "input"):
            joined = torch.cat([part[name] for part in parts])
            torch.testing.assert_close(joined, expected[name], **close)
        for name in {"weight", "bias"} & expected.keys():
            summed = parts[0][name] + parts[1][name]
            torch.testing.assert_close(summed, expected[name], **close)
        running = {"running_mean", "running_var", "num_batches_tracked"} & expected.keys()
        assert len(running) == (0 if "track_running_stats" in run[3] else 3)
        for name, part in itertools.product(running, parts):
            torch.testing.assert_close(part[name], expected[name], **close)


def test_half_precision_with_an_empty_rank(pool: Pools) -> None:
    parts = pool(2).run(run_divided, [0, 4], [3], torch.float16, {})
    expected = run_joined([0, 4], [3], torch.float32, {})
    assert parts[0]["output"].shape == (0, CHANNELS, 3)
    assert parts[1]["output"].dtype is parts[1]["input"].dtype is torch.float16
    torch.testing.assert_close(parts[1]["output"].float(), expected["output"], rtol=1e-2, atol=1e-2)
    for part in parts:
        torch.testing.assert_close(
            part["running_mean"], expected["running_mean"], rtol=1e-2, atol=1e-2
        )
        assert part["running_mean"].dtype is torch.float32


def nothing_anywhere() -> dict[str, Tensor]:
    norm = make_norm(pycoll.SyncBatchNorm)
    return results_of(norm, torch.empty(0, CHANNELS, 4), torch.empty(0, CHANNELS, 4))


def test_no_samples_at_all(pool: Pools) -> None:
    for world_size in (1, 2):
        for got in pool(world_size).run(nothing_anywhere):
            assert got["output"].shape == got["input"].shape == (0, CHANNELS, 4)
            assert got["weight"].tolist() == got["bias"].tolist() == [0.0] * CHANNELS
            assert got["running_mean"].tolist() == [0.0] * CHANNELS
            assert got["running_var"].tolist() == [1.0] * CHANNELS
            assert int(got["num_batches_tracked"]) == 0


def other_spatial_sizes() -> list[float]:
    """Every element of a channel counts once, also where images have other sizes."""
    size = 2 if dist.get_rank() == 0 else 6
    norm = pycoll.SyncBatchNorm(1, affine=False, momentum=1.0)
    norm(torch.full((1, 1, size), float(dist.get_rank())))
    return [norm.running_mean.item(), norm.running_var.item()]


def test_other_spatial_sizes(pool: Pools) -> None:
    # Two zeros and six ones: mean 0.75, unbiased variance 1.5 / 7.
    for mean, variance in pool(2).run(other_spatial_sizes):
        assert mean == pytest.approx(0.75)
        assert variance == pytest.approx(1.5 / 7)


def train_converted() -> tuple[bool, list[str]]:
    """A converted network in DistributedDataParallel, against one process with the joined batch."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(4, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.ReLU())
        return nn.Sequential(inner, nn.BatchNorm1d(CHANNELS, affine=False), nn.Linear(CHANNELS, 2))

    rank, world_size = dist.get_rank(), dist.get_world_size()
    alone = make()
    model = pycoll.SyncBatchNorm.convert_sync_batchnorm(make())
    kinds = [type(m).__name__ for m in model.modules()]
    ddp = pycoll.DistributedDataParallel(model)
    for step in range(3):
        x = torch.randn(4 * world_size, 4, generator=torch.Generator().manual_seed(step))
        for m, part in ((alone, x), (ddp, x[4 * rank : 4 * rank + 4])):
            m.zero_grad()
            m(part).square().mean().backward()
            with torch.no_grad():
                for p in m.parameters():
                    p -= 0.1 * p.grad
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    for b, c in zip(model.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(b, c, rtol=1e-4, atol=1e-5)
    ddp.check_in_sync()
    model.eval()
    if rank == 0:  # evaluation asks nobody
        torch.testing.assert_close(model(x), alone.eval()(x), rtol=1e-4, atol=1e-5)
    return model[0][1].weight is not None, kinds


def test_conversion(pool: Pools) -> None:
    for world_size in (1, 2, 3):
        for has_weight, kinds in pool(world_size).run(train_converted):
            assert has_weight
            assert kinds.count("SyncBatchNorm") == 2
            assert "BatchNorm1d" not in kinds


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="at least 2D"):
        pycoll.SyncBatchNorm(3)(torch.ones(3))
