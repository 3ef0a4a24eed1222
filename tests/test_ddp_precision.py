"""DistributedDataParallel with mixed precision, and with gradients that wait for another one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_model import equal_on_all_ranks
from test_ddp import CHECKPOINTS, Network
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision as MixedPrecision

import pycoll
from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# --- mixed precision -------------------------------------------------------------------------------


def rows(step: int, rank: int) -> Tensor:
    """(5, 13), of this rank and step."""
    generator = torch.Generator().manual_seed(17 * step + rank)
    return torch.randn(5, 13, generator=generator)


def expected_gradients(
    model: nn.Module, x: Tensor, compute: torch.dtype | None, reduce: torch.dtype | None
) -> dict[str, Tensor]:
    """Computed with cast parameters, one by one through the group, and back."""
    named = dict(model.named_parameters())
    leaves = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
    cast = {name: p.to(compute or p.dtype) for name, p in leaves.items()}
    output = torch.func.functional_call(model, cast, (x.to(compute or x.dtype),))
    output.float().square().mean().backward()
    result = {}
    for name, leaf in leaves.items():
        grad = leaf.grad.to(reduce or compute or leaf.dtype)
        pycoll.all_reduce(grad, "avg")
        result[name] = grad.to(leaf.dtype)
    return result


def trains_in(compute: Any, reduce: Any, checkpointing: str, views: bool) -> list[str]:
    """Names of parameters whose gradients are not as expected, over three steps."""
    rank, wrong = dist.get_rank(), []
    model = Network(checkpointing)
    seen: set[torch.dtype] = set()
    model.shared.register_forward_pre_hook(lambda m, a: seen.add(m.weight.dtype))
    ddp = pycoll.DistributedDataParallel(
        model,
        mixed_precision=MixedPrecision(compute, reduce),
        bucket_cap_mb=5e-4,
        gradient_as_bucket_view=views,
    )
    plain = Network()
    # Reentrant checkpoints add parts of a gradient in float32, where others add them before the cast.
    tolerance = 2e-2 if checkpointing == "reentrant" and compute is not None else 0
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        plain.load_state_dict(model.state_dict())
        want = expected_gradients(plain, rows(step, rank), compute, reduce)
        output = ddp(rows(step, rank))
        assert output.dtype == (compute or FP32)
        assert all(isinstance(p, nn.Parameter) and p.dtype == FP32 for p in model.parameters())
        optimizer.zero_grad()
        output.float().square().mean().backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            assert p.grad.dtype == FP32
            if not torch.allclose(p.grad, want[name], rtol=tolerance, atol=tolerance / 10):
                wrong.append(f"step {step}: {name} {(p.grad - want[name]).abs().max():.1e}")
        optimizer.step()
    assert seen == {compute or FP32}
    assert equal_on_all_ranks(list(model.parameters()))
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("compute", "reduce"),
    [(BF16, None), (BF16, FP32), (FP16, BF16), (None, FP16), (torch.float64, FP32)],
)
def test_gradients_in_mixed_precision(
    pool: Pools, world_size: int, compute: Any, reduce: Any
) -> None:
    for number, checkpointing in enumerate(CHECKPOINTS):
        arguments = (compute, reduce, checkpointing, number % 2 == 1)
        for wrong in pool(world_size).run(trains_in, *arguments):
            assert not wrong, (checkpointing, wrong)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("no gradient")


class FailsOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(13, 13)
        self.register_buffer("offset", torch.ones(13))
        self.register_buffer("number", torch.tensor(1))
        self.fails = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(Fails.apply(self.layer(x)) if self.fails else self.layer(x))
        return x + self.offset * self.number


def fails_and_goes_on() -> None:
    rank, model = dist.get_rank(), FailsOnce()
    config = MixedPrecision(BF16, FP32, FP16)
    ddp = pycoll.DistributedDataParallel(model, mixed_precision=config)
    assert (model.offset.dtype, model.number.dtype) == (FP16, torch.int64)
    with pytest.raises(ValueError, match="no gradient"):
        ddp(rows(0, rank)).sum().backward()
    # Whatever has become of the pass: the model holds its own parameters again.
    assert all(isinstance(p, nn.Parameter) and p.dtype == FP32 for p in model.parameters())
    assert model.layer.weight is dict(model.named_parameters())["layer.weight"]
    model.fails = False
    before = model.layer.weight.grad
    assert before is None or before.dtype == FP32


def test_a_failed_backward_gives_parameters_back(pool: Pools) -> None:
    pool(1).run(fails_and_goes_on)


def accumulates() -> None:
    """Sums stay in float32: adding 1/512 to 1 three times is lost in bfloat16."""
    layer = nn.Linear(1, 1, bias=False)
    ddp = pycoll.DistributedDataParallel(layer, mixed_precision=MixedPrecision(BF16, FP32))
    with ddp.no_sync():
        for x in (1.0, 2.0**-9, 2.0**-9):
            ddp(torch.full((1, 1), x)).sum().backward()
    ddp(torch.full((1, 1), 2.0**-9)).sum().backward()
    assert layer.weight.grad.item() == 1 + 3 * 2.0**-9
    with torch.no_grad():
        assert ddp(torch.ones(1, 1)).dtype == BF16
    for again in (copy.deepcopy(ddp), repickled(ddp)):
        assert again(torch.ones(1, 1)).dtype == BF16
        assert again.module.weight.dtype == FP32


def repickled(ddp: nn.Module) -> Any:
    held = io.BytesIO()
    torch.save(ddp, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


def test_accumulation_and_copies_in_mixed_precision(pool: Pools) -> None:
    pool(2).run(accumulates)


def order_of_gradients() -> list[str]:
    model = nn.Sequential(*(nn.Linear(13, 13, bias=False) for _ in range(3)))
    order: list[str] = []
    for i, layer in enumerate(model):
        layer.register_forward_hook(
            lambda m, a, out, i=i: (out.register_hook(lambda g: order.append(f"layer {i}")), None)[
                1
            ]
        )
        layer.weight.register_post_accumulate_grad_hook(
            lambda p, i=i: order.append(f"gradient {i}")
        )
    ddp = pycoll.DistributedDataParallel(model, mixed_precision=MixedPrecision(BF16))
    ddp(rows(0, 0)).sum().backward()
    return order


def test_gradients_come_early_in_mixed_precision(pool: Pools) -> None:
    """Casts are recorded before the model, and yet not left to the end of the backward pass."""
    (order,) = pool(1).run(order_of_gradients)
    assert order.index("gradient 2") < order.index("layer 0")
    assert order.index("gradient 1") < order.index("gradient 0")


def wrong_precisions() -> list[str]:
    texts = []
    for config in (object(), MixedPrecision(torch.int32), MixedPrecision(BF16, torch.float8_e5m2)):
        with pytest.raises((TypeError, ValueError)) as caught:
            pycoll.DistributedDataParallel(nn.Linear(2, 2), mixed_precision=config)
        texts.append(str(caught.value))
    return texts


def test_wrong_precisions(pool: Pools) -> None:
    (texts,) = pool(1).run(wrong_precisions)
    for text, words in zip(
        texts,
        [
            "object without param_dtype",
            "param_dtype is torch.int32",
            "reduce_dtype is torch.float8",
        ],
        strict=True,
    ):
        assert words in text


# --- gradients that wait ---------------------------------------------------------------------------


class WithTable(nn.Module):
    """A table whose gradient is made by hand while the backward pass runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(13, 13)
        self.table = nn.Parameter(torch.ones(7, 11))
        self.bias = nn.Parameter(torch.ones(13))
        self.last = nn.Linear(13, 13)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) + self.bias
        if torch.is_grad_enabled():
            x.register_hook(self._by_hand)
        return self.last(x)

    def _by_hand(self, _: Tensor) -> None:
        grad = torch.arange(77.0).view(7, 11) * (1 + dist.get_rank())
        if self.table.grad is None:
            self.table.grad = grad
        else:
            self.table.grad.copy_(grad)


def delays(views: bool, static: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model, plain = WithTable(), WithTable()
    named = [("table", model.table), ("bias", model.bias)]
    ddp = pycoll.DistributedDataParallel(
        model,
        delay_all_reduce_named_params=named,
        param_to_hook_all_reduce=model.first.weight,
        bucket_cap_mb=1e-6,
        gradient_as_bucket_view=views,
        static_graph=static,
    )
    for step in range(4):
        ddp.zero_grad(set_to_none=step < 2)
        plain.zero_grad()
        plain(rows(step, rank)).square().mean().backward()
        ddp(rows(step, rank)).square().mean().backward()
        mean = torch.arange(77.0).view(7, 11) * (world_size + 1) / 2
        torch.testing.assert_close(model.table.grad, mean, rtol=1e-6, atol=0)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if name != "table":
                pycoll.all_reduce(q.grad, "avg")
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-7)
    shared = [b.names for b in ddp.reducer.history[-1].buckets if "table" in b.names]
    assert shared == [("table", "bias", "first.weight")]


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_gradients_that_wait_for_another(pool: Pools, views: bool, static: bool) -> None:
    for world_size in (1, 2, 3):
        pool(world_size).run(delays, views, static)


def wrong_delays() -> list[str]:
    model = WithTable()
    other = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.register_parameter("other", other)
    weight = model.first.weight
    wrong: list[tuple[Any, Any]] = [
        (None, weight),
        ([("table", model.table)], nn.Parameter(torch.ones(1))),
        ([("table", model.bias)], weight),
        ([("first.weight", weight)], weight),
        ([("other", other)], weight),
    ]
    texts = []
    for named, until in wrong:
        with pytest.raises(ValueError) as caught:
            pycoll.DistributedDataParallel(
                model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=until
            )
        texts.append(str(caught.value))
    return texts


def test_wrong_delays(pool: Pools) -> None:
    (texts,) = pool(1).run(wrong_delays)
    words = [
        "at the same time",
        "another module",
        "is not that parameter",
        "itself",
        "share a bucket",
    ]
    for text, word in zip(texts, words, strict=True):
        assert word in text
