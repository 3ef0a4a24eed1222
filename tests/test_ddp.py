"""DistributedDataParallel trains as one process does on the joined batch, step by step, in every way to run a model."""

from __future__ import annotations

import copy
import itertools
import random
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_model import batch, equal_on_all_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pycoll
from pycoll.testing import RankPool, report_progress

Pools = Callable[[int], RankPool]

STEPS = 3
CHECKPOINTS = ("none", "reentrant", "non-reentrant")


class Network(nn.Module):
    """Layers that are reused (`shared` runs twice), tied (`out` has `first`'s weight) and 0-dim (`scale`)."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        torch.manual_seed(7)
        self.checkpointing = checkpointing
        self.first = nn.Linear(13, 13)
        self.shared = nn.Linear(13, 13)
        self.norm = nn.LayerNorm(13)
        self.out = nn.Linear(13, 13)
        self.out.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.shared(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            if self.checkpointing == "none":
                x = self.block(x)
            else:
                x = checkpoint(self.block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.out(x) * self.scale


@dataclass(frozen=True)
class Run:
    """How a model is trained.

    Attributes: cap_mb of buckets; accumulation: micro-batches a step; synced: all of them synchronise, else the last;
        checkpointing;
        as_view: gradient_as_bucket_view; static: static_graph; delays: of hooks and reductions, at random; zeros:
        zero_grad keeps tensors.
    """

    cap_mb: float = 25.0
    accumulation: int = 1
    synced: bool = False
    checkpointing: str = "none"
    as_view: bool = False
    static: bool = False
    delays: bool = False
    zeros: bool = False

    def may_be_refused(self) -> bool:
        """A block in two reentrant checkpoints may add to a gradient that has been sent from where it lies."""
        return self.checkpointing == "reentrant" and self.as_view and not self.static


def slow_down(module: nn.Module) -> None:
    """Gradients come late, by other delays on every rank and in every step."""
    generator = random.Random(dist.get_rank())
    for p in module.parameters():
        p.register_hook(lambda _: time.sleep(generator.random() * 2e-3))


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


def micro_batch(step: int, part: int, ranks: Iterable[int]) -> Tensor:
    return torch.cat([batch(10 * step + part, rank) for rank in ranks])


def losses_and_weights_alone(run: Run, world_size: int) -> list[list[Tensor]]:
    """The weights after each step of one process with the batches of all ranks."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    weights = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(run.accumulation):
            x = micro_batch(step, part, range(world_size))
            loss_of(model, x).backward()
        optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    return weights


def train(run: Run) -> list[list[Tensor]]:
    """On a rank: the weights after each step."""
    torch.manual_seed(dist.get_rank())
    model = Network(run.checkpointing)
    if dist.get_rank() != 0:
        with torch.no_grad():
            model.scale.fill_(9.0)  # construction takes rank 0's
    ddp = pycoll.DistributedDataParallel(
        model,
        bucket_cap_mb=run.cap_mb,
        gradient_as_bucket_view=run.as_view,
        static_graph=run.static,
    )
    if run.delays:
        slow_down(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3, momentum=0.9)
    rank, weights = dist.get_rank(), []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not run.zeros)
        for part in range(run.accumulation):
            x = micro_batch(step, part, [rank])
            if part == run.accumulation - 1 or run.synced:
                loss_of(ddp, x.requires_grad_()).backward()
            else:
                with ddp.no_sync():
                    loss_of(ddp, x.requires_grad_()).backward()
        optimizer.step()
        weights.append([p.detach().clone() for p in ddp.parameters()])
    return weights


def attempt(run: Run) -> tuple[list[list[Tensor]], str]:
    try:
        return train(run), ""
    except RuntimeError as error:
        return [], str(error)


def check_runs(runs: Sequence[Run]) -> None:
    for run in runs:
        report_progress(str(run))
        trained, refusal = attempt(run)
        if refusal:
            assert run.may_be_refused(), f"{run}: {refusal}"
            assert "static_graph=True" in refusal
            continue
        expected = losses_and_weights_alone(run, dist.get_world_size())
        for step, (mine, alone) in enumerate(zip(trained, expected, strict=True)):
            assert equal_on_all_ranks(mine), f"{run}, step {step}: the ranks differ"
            for a, b in zip(mine, alone, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=f"{run}, step {step}")


def all_runs() -> list[Run]:
    choices = itertools.product(
        (1e-6, 1e-3, 25.0), (1, 3), (False, True), CHECKPOINTS, *[(False, True)] * 4
    )
    return [Run(*choice) for choice in choices]


def sample(runs: Sequence[Run], number: int, world_size: int) -> list[Run]:
    """A few of them, others for each world size."""
    return random.Random(world_size).sample(list(runs), number)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parity(pool: Pools, world_size: int) -> None:
    """Bucket cap, accumulation, checkpointing, views, static graphs, delays."""
    pool(world_size).run(check_runs, sample(all_runs(), 24, world_size), timeout=120)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parity_of_all_runs(pool: Pools, world_size: int) -> None:
    pool(world_size).run(check_runs, all_runs(), timeout=900)


def test_parity_notices_ranks_that_train_apart(pool: Pools) -> None:
    """The check itself: a rank whose reductions are lost."""
    with pytest.raises(RuntimeError, match="Run"):
        pool(2).run(check_with_a_lost_bucket, timeout=20)


def check_with_a_lost_bucket() -> None:
    from pycoll.parallel import gradients, reducer

    original = gradients.copy_out

    def lossy(bucket: Any, *rest: Any) -> None:
        if bucket.index != 1:
            original(bucket, *rest)

    reducer.copy_out = lossy
    try:
        check_runs([Run(cap_mb=1e-6)])
    finally:
        reducer.copy_out = original


# --- the same bits ---------------------------------------------------------------------------------


def weights_by_caps(caps: Sequence[Any]) -> list[list[Tensor]]:
    trained = []
    for cap in caps:
        report_progress(str(cap))
        how = {"bucket_cap_mb_list": cap} if isinstance(cap, list) else {"bucket_cap_mb": cap}
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(13, 301), nn.Tanh(), nn.Linear(301, 57), nn.Linear(57, 3))
        ddp = pycoll.DistributedDataParallel(model, **how)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.05)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(ddp, batch(step, dist.get_rank())).backward()
            optimizer.step()
        trained.append([p.detach().clone() for p in ddp.parameters()])
    return trained


@pytest.mark.parametrize("world_size", [3, 4])
def test_bucket_sizes_do_not_change_a_bit(pool: Pools, world_size: int) -> None:
    caps = [1e-6, 0.01, 0.07, None, 100.0, [0.001, 0.03], [0.05, 0.001]]
    everyone = pool(world_size).run(weights_by_caps, caps)
    reference = everyone[0][0]
    for rank, trained in enumerate(everyone):
        for cap, weights in zip(caps, trained, strict=True):
            assert all(map(torch.equal, weights, reference)), (rank, cap)


# --- gradients of gradients ------------------------------------------------------------------------


def penalty_loss(model: nn.Module, x: Tensor, how: str) -> None:
    """Backward passes of the squared output plus a penalty on a gradient; the sum over samples is the loss."""
    if how == "input":
        x = x.clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (y.square().sum() + slope.square().sum()).backward()
    else:
        model(x).square().sum().backward(create_graph=True)


def double_backward(how: str, as_view: bool) -> bool:
    def make() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 2))

    alone, model = make(), make()
    ddp = pycoll.DistributedDataParallel(model, gradient_as_bucket_view=as_view, bucket_cap_mb=1e-6)
    world_size = dist.get_world_size()
    for step in range(2):
        alone.zero_grad()
        ddp.zero_grad()
        penalty_loss(alone, micro_batch(step, 0, range(world_size)), how)
        penalty_loss(ddp, micro_batch(step, 0, [dist.get_rank()]), how)
        if how == "parameters":
            # The gradients have a graph of their own: a penalty on the mean gradient.
            for m, scale in ((alone, 1.0 / world_size), (model, 1.0)):
                total = sum(((p.grad * scale) ** 2).sum() for p in m.parameters())
                grads = [p.grad.detach() for p in m.parameters()]
                for p in m.parameters():
                    p.grad = None
                total.backward()
                del grads
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad / world_size, rtol=1e-4, atol=1e-5)
    return equal_on_all_ranks([p.grad for p in model.parameters()])


@pytest.mark.parametrize("as_view", [False, True])
def test_double_backward_through_inputs(pool: Pools, as_view: bool) -> None:
    assert all(pool(2).run(double_backward, "input", as_view))


# --- reentrant checkpoints -------------------------------------------------------------------------


class TwoCheckpoints(nn.Module):
    """One layer in two reentrant checkpoints: its gradients come in two parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.last = nn.Linear(13, 13), nn.Linear(13, 13)
        self.times = 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.last(x)


def late_gradients(as_view: bool, static: bool, zeros: bool) -> str:
    model, alone = TwoCheckpoints(), TwoCheckpoints()
    ddp = pycoll.DistributedDataParallel(
        model, bucket_cap_mb=1e-6, gradient_as_bucket_view=as_view, static_graph=static
    )
    for step in range(3):
        ddp.zero_grad(set_to_none=not zeros)
        alone.zero_grad()
        joined = micro_batch(step, 0, range(dist.get_world_size()))
        loss_of(alone, joined.requires_grad_()).backward()
        x = micro_batch(step, 0, [dist.get_rank()]).requires_grad_()
        try:
            loss_of(ddp, x).backward()
        except RuntimeError as error:
            return str(error)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    return "right"


@pytest.mark.parametrize("zeros", [False, True])
def test_a_parameter_in_two_reentrant_checkpoints(pool: Pools, zeros: bool) -> None:
    """torch raises; here it is right, but for gradients that are sent from where they lie."""
    assert pool(2).run(late_gradients, False, False, zeros) == ["right"] * 2
    assert pool(2).run(late_gradients, False, True, zeros) == ["right"] * 2
    assert pool(2).run(late_gradients, True, True, zeros) == ["right"] * 2
    for text in pool(2).run(late_gradients, True, False, zeros):
        assert "'layer." in text
        assert "static_graph=True" in text


def graph_that_is_not_static(odd: int) -> str:
    model = TwoCheckpoints()
    ddp = pycoll.DistributedDataParallel(model, static_graph=True)
    x = micro_batch(0, 0, [dist.get_rank()]).requires_grad_()
    for _ in range(2):
        ddp(x).sum().backward()
    model.times += dist.get_rank() == odd
    try:
        ddp(x).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "right"


def test_a_graph_that_was_said_to_be_static(pool: Pools) -> None:
    for text in pool(2).run(graph_that_is_not_static, 1):
        assert "static_graph" in text
        assert "rank 1" in text
        assert "'layer.weight'" in text


# --- failures in between ---------------------------------------------------------------------------


def backward_that_fails(all_ranks: bool) -> tuple[str, list[float]]:
    """Once, in the middle of a pass; then training goes on."""
    rank = dist.get_rank()
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3)))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    ddp = pycoll.DistributedDataParallel(model, bucket_cap_mb=1e-6)

    def fail(grad: Tensor) -> None:
        raise KeyError("planted")

    handle = model[0].weight.register_hook(fail) if all_ranks or rank == 1 else None
    x = torch.full((1, 1), rank + 1.0)
    text = ""
    try:
        ddp(x).sum().backward()
    except KeyError:
        text = "planted"
    except RuntimeError as error:
        text = str(error)
    if not all_ranks:
        return text, []
    if handle is not None:
        handle.remove()
    ddp.zero_grad()
    ddp(x).sum().backward()
    return text, [p.grad.item() for p in model.parameters()]


def test_a_backward_pass_that_fails_on_all_ranks(pool: Pools) -> None:
    assert pool(2).run(backward_that_fails, True) == [("planted", [1.5] * 3)] * 2


def wrapped_again() -> list[list[float]]:
    """A wrapper that is gone reduces no more; its hooks do not keep it."""
    scale = dist.get_rank() + 1.0
    seen = []
    model = nn.Linear(1, 1, bias=False)
    first = pycoll.DistributedDataParallel(model)
    first(torch.full((1, 1), scale)).sum().backward()
    reducer = weakref.ref(first.reducer)
    del first
    assert reducer() is None
    for _ in range(2):
        ddp = pycoll.DistributedDataParallel(model)
        for _ in range(2):
            model.zero_grad()
            before = pycoll.events()[-1]["sequence"]
            ddp(torch.full((1, 1), scale)).sum().backward()
            reductions = [e for e in pycoll.events() if e["sequence"] > before and e["op"] == "AVG"]
            seen.append([model.weight.grad.item(), float(len(reductions))])
    return seen


def test_a_module_that_is_wrapped_again(pool: Pools) -> None:
    assert pool(2).run(wrapped_again) == [[[1.5, 1.0]] * 4] * 2


# --- changes and copies ----------------------------------------------------------------------------


def unfreeze(as_view: bool) -> list[list[Any]]:
    scale = dist.get_rank() + 1.0
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    model[0].requires_grad_(False)
    ddp = pycoll.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    seen = []
    for step in range(6):
        if step == 2:
            model[0].requires_grad_(True)
        if step == 4:
            model[1].requires_grad_(False)
        ddp.zero_grad()
        ddp(torch.full((1, 1), scale)).sum().backward()
        seen.append([None if p.grad is None else p.grad.item() for p in model.parameters()])
    return seen


@pytest.mark.parametrize("as_view", [False, True])
def test_requires_grad_may_change(pool: Pools, as_view: bool) -> None:
    expected = [[None, 1.5]] * 2 + [[1.5, 1.5]] * 2 + [[1.5, None]] * 2
    assert pool(2).run(unfreeze, as_view) == [expected] * 2


def train_copies() -> list[float]:
    import io

    scale = dist.get_rank() + 1.0
    ddp = pycoll.DistributedDataParallel(nn.Linear(1, 1, bias=False), bucket_cap_mb=3)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    seen = []
    for each in (ddp, copy.deepcopy(ddp), loaded, copy.deepcopy(loaded)):
        assert each.reducer.settings == ddp.reducer.settings
        for _ in range(2):
            each.zero_grad()
            each(torch.full((1, 1), scale)).sum().backward()
            seen.append(each.module.weight.grad.item())
    return seen


def test_copies_train_on(pool: Pools) -> None:
    assert pool(2).run(train_copies) == [[1.5] * 8] * 2


def train_ignoring() -> tuple[float, float]:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0 + rank)
    pycoll.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    ddp = pycoll.DistributedDataParallel(model)
    ddp(torch.ones(1, 1)).sum().backward()
    return model[0].weight.grad.item(), model[1].weight.grad.item()


def test_ignored_parameters_are_left_alone(pool: Pools) -> None:
    # The first weight is rank 0's 1 on both ranks, the second each rank's own.
    assert pool(2).run(train_ignoring) == [(1.5, 1.0), (1.5, 1.0)]
