"""DataParallel on copies of the CPU: results, gradients, buffers and the bytes that each device moves."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from typing import Any

import pytest
import torch
from small_model import loss_of, make_model
from torch import Tensor, nn

import pycoll
from pycoll.parallel.dp import gather, scatter
from pycoll.parallel.local_group import LocalGroup

pytestmark = pytest.mark.slow

Pair = namedtuple("Pair", ["left", "right"])


def inputs(rows: int) -> Tensor:
    return torch.randn(rows, 13, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_training_is_that_of_the_module(number: int) -> None:
    model = make_model()
    alone = copy.deepcopy(model)
    parallel = pycoll.DataParallel(model, ["cpu"] * number)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (parallel, alone)]
    # 2 rows on 4 devices: fewer parts than devices.
    for rows in (12, 7, 2):
        for m, optimizer in zip((parallel, alone), optimizers, strict=True):
            optimizer.zero_grad()
            for _ in range(2):  # gradients accumulate
                loss_of(m, inputs(rows)).backward()
            optimizer.step()
        torch.testing.assert_close(parallel(inputs(rows)), alone(inputs(rows)))
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [3, 4, 6])
def test_no_device_moves_more_than_its_share(number: int) -> None:
    """The first device would move (N - 1)(w + g) bytes if it dealt with each of the others."""
    model = nn.Sequential(nn.Linear(128, 500), nn.Linear(500, 7))
    parallel = pycoll.DataParallel(model, ["cpu"] * number)
    parallel(torch.randn(12, 128)).square().mean().backward()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    moved = parallel.group().bytes_moved()
    assert len(moved) == number
    # Every device holds all weights and gives all gradients: that much it has to move.
    assert min(moved) >= 2 * weights * (number - 1) / number
    # Weights and gradients in and out, in parts, whatever the number of devices.
    assert max(moved) <= 2.5 * (weights + weights)
    assert max(moved) < (number - 1) * (weights + weights)


class Everything(nn.Module):
    """Buffers, a batch norm, frozen, unused, tied and double parameters; nested arguments and outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.tensor([2.0]), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.wide = nn.Parameter(torch.ones(1, 4, dtype=torch.float64))
        self.absent = None
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, pair: Any, *, scale: float, more: dict[str, Tensor]) -> Any:
        self.calls += 1
        y = self.second(torch.tanh(self.first(pair.left))) * self.frozen * scale
        return {"y": y, "all": [(y.double() * self.wide, more["x"] + 1), None]}


def test_nested_values_and_special_parameters() -> None:
    model = Everything()
    alone = copy.deepcopy(model)
    parallel = pycoll.DataParallel(model, ["cpu"] * 3)
    x, other = torch.randn(7, 4), torch.arange(7.0)
    for m in (parallel, alone):
        out = m(Pair(x, "text"), scale=3.0, more={"x": other})
        assert out["all"][1] is None
        assert out["all"][0][1].tolist() == (other + 1).tolist()
        (out["y"].sum() + out["all"][0][0].square().sum()).backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(p.grad, q.grad)
    # The first copy is the module itself: what its forward writes stays.
    assert int(model.calls) == int(alone.calls) == 1


def test_running_statistics_are_those_of_the_first_part() -> None:
    norm = nn.BatchNorm1d(4)
    parallel = pycoll.DataParallel(norm, ["cpu", "cpu"])
    x = torch.randn(8, 4)
    parallel(x)
    expected = nn.BatchNorm1d(4)
    expected(x[:4])
    torch.testing.assert_close(norm.running_mean, expected.running_mean)
    assert int(norm.num_batches_tracked) == 1


def test_threads_have_the_callers_modes() -> None:
    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            return x @ self.weight

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = pycoll.DataParallel(Modes(), ["cpu", "cpu"])(torch.ones(4, 2))
    assert out.dtype is torch.bfloat16
    assert not out.requires_grad


def test_scalars_and_dims() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x.mean(dim=1) * self.weight).sum()

    model = Loss()
    parallel = pycoll.DataParallel(model, ["cpu", "cpu"], dim=1)
    x = torch.arange(12.0).view(3, 4)
    with pytest.warns(UserWarning, match="scalars"):
        losses = parallel(x)
    assert losses.tolist() == [0.5 + 4.5 + 8.5, 2.5 + 6.5 + 10.5]
    losses.mean().backward()
    assert model.weight.grad.tolist() == [1.5, 5.5, 9.5]


def test_scatter_and_gather() -> None:
    value = [Pair(torch.arange(5), {"a": torch.arange(10.0, 15.0)}), "word", None]
    parts = scatter(value, 2, 0)
    assert [part[0].left.tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert [part[1:] for part in parts] == [["word", None]] * 2
    assert (
        gather([part[0] for part in parts], 0).right["a"].tolist() == value[0].right["a"].tolist()
    )
    assert scatter("no tensor", 3, 0) == ["no tensor"] * 3
    with pytest.raises(ValueError, match="split into"):
        scatter([torch.ones(4), torch.ones(1)], 2, 0)
    with pytest.raises(ValueError, match="keys"):
        gather([{"a": torch.ones(1)}, {"b": torch.ones(1)}], 0)


def test_errors() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            if bool((x == 3).any()):
                raise KeyError("three")
            return x * self.weight

    parallel = pycoll.DataParallel(Failing(), ["cpu", "cpu"])
    with pytest.raises(KeyError, match="three"):
        parallel(torch.arange(4.0))
    assert parallel(torch.ones(4)).tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="CPU tensors only"):
        pycoll.DataParallel(nn.Linear(1, 1), [0, 1])
    with pytest.raises(ValueError, match="empty"):
        pycoll.DataParallel(nn.Linear(1, 1), [])
    with pytest.raises(ValueError, match="2 ranks at least"):
        LocalGroup(1)


def test_copies() -> None:
    parallel = pycoll.DataParallel(make_model(), ["cpu", "cpu"])
    expected = parallel(inputs(6))
    for duplicate in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
        torch.testing.assert_close(duplicate(inputs(6)), expected)


@pytest.mark.parametrize("numel", [0, 1, 5, 1000, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_a_local_group(numel: int, dtype: torch.dtype) -> None:
    """Values depend on rank and position."""
    group = LocalGroup(3)
    source = (torch.arange(numel) % 31).to(dtype)
    for received in group.spread(source):
        assert torch.equal(received, source)
    values = [((torch.arange(numel) * 7 + 3 * rank) % 13).to(dtype) for rank in range(3)]
    expected = torch.stack([v.to(torch.complex64) for v in values]).sum(dim=0).to(dtype)
    assert torch.equal(group.collect(values), expected)
