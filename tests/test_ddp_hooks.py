"""Communication hooks of DistributedDataParallel: torch's own unchanged, and 8-bit ones with error feedback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
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

import pycoll
from pycoll.parallel.comm_hooks import Float8State, Int8State, QuantisedState, quantised_hook
from pycoll.parallel.quantise import FP8, INT8, BlockFormat, decode, encode, row_nbytes
from pycoll.testing import RankPool

pytestmark = pytest.mark.slow

Pools = Callable[[int], RankPool]


# --- numbers as bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [INT8, FP8, BlockFormat(torch.int8, 4)])
def test_encoding_keeps_within_its_bound(block: BlockFormat) -> None:
    numel = 6 * block.block_numel
    values = torch.randn(3, numel) * torch.logspace(-20, 20, numel)
    values[1, : block.block_numel] = 0.0
    rows = encode(values, block)
    assert rows.shape == (3, row_nbytes(numel, block))
    assert rows.dtype is torch.uint8
    back = decode(rows, block)
    largest = values.view(3, -1, block.block_numel).abs().amax(2, keepdim=True)
    largest = largest.expand(-1, -1, block.block_numel).reshape(3, -1)
    bound = largest / 254 if block.dtype is torch.int8 else values.abs() / 16 + largest / 229_376
    assert bool(((back - values).abs() <= bound * 1.001).all())
    assert torch.equal(back[1, : block.block_numel], torch.zeros(block.block_numel))


@pytest.mark.parametrize("block", [INT8, FP8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_seen(block: BlockFormat, bad: float) -> None:
    values = torch.ones(1, 2 * block.block_numel)
    values[0, 5] = bad
    back = decode(encode(values, block), block)
    assert not bool(torch.isfinite(back[0, : block.block_numel]).any())
    # A scale is rounded toward zero, and so is the largest number.
    torch.testing.assert_close(
        back[0, block.block_numel :], torch.ones(block.block_numel), rtol=2.0**-22, atol=0.0
    )


# --- torch's hooks ---------------------------------------------------------------------------------


def mean_gradients() -> list[Tensor]:
    model = make_model()
    x = torch.cat([batch(0, rank) for rank in range(dist.get_world_size())])
    loss_of(model, x).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def gradients_by_torchs_hook(name: str, tolerance: float, as_view: bool) -> bool:
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

    ddp = pycoll.DistributedDataParallel(
        make_model(), bucket_cap_mb=1e-3, gradient_as_bucket_view=as_view
    )
    state = power_sgd.PowerSGDState(
        None, matrix_approximation_rank=31, start_powerSGD_iter=2, min_compression_rate=0.01
    )
    hook, hook_state = {
        "allreduce": (default_hooks.allreduce_hook, None),
        "fp16": (default_hooks.fp16_compress_hook, None),
        "bf16": (default_hooks.bf16_compress_hook, None),
        "wrapped": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), None),
        "noop": (debugging_hooks.noop_hook, None),
        "power_sgd": (power_sgd.powerSGD_hook, state),
    }[name]
    ddp.register_comm_hook(hook_state, hook)
    for _ in range(4):
        ddp.zero_grad()
        loss_of(ddp, batch(0, dist.get_rank())).backward()
    gradients = [p.grad for p in ddp.parameters()]
    if name == "noop":
        return not equal_on_all_ranks(gradients)
    for mine, expected in zip(gradients, mean_gradients(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance * 0.02)
    return equal_on_all_ranks(gradients)


@pytest.mark.parametrize("as_view", [False, True])
def test_torchs_hooks(pool: Pools, as_view: bool) -> None:
    hooks = {"allreduce": 1e-4, "fp16": 5e-3, "bf16": 3e-2, "wrapped": 5e-3, "noop": 0.0}
    for name, tolerance in hooks.items():
        assert all(pool(2).run(gradients_by_torchs_hook, name, tolerance, as_view)), name
    assert all(pool(3).run(gradients_by_torchs_hook, "allreduce", 1e-4, as_view))


def test_power_sgd(pool: Pools) -> None:
    """Calls collectives from callbacks of futures."""
    assert all(pool(2).run(gradients_by_torchs_hook, "power_sgd", 1e-3, False, timeout=60))


def buckets_as_hooks_see_them() -> list[list[Any]]:
    """Every method of a bucket, through a hook that also doubles what it is given."""
    seen: list[list[Any]] = []

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(3, 2))
            self.b = nn.Parameter(torch.ones(5, dtype=torch.complex64))

        def forward(self, scale: float) -> Tensor:
            return (self.a * scale).sum() + (self.b * scale * (1 - 2j)).sum().real

    def hook(state: list[list[Any]], bucket: Any) -> torch.futures.Future:
        shapes = [tuple(g.shape) for g in bucket.gradients()]
        numel = sum(g.numel() for g in bucket.gradients())
        assert numel == bucket.buffer().numel()
        assert len(bucket.parameters()) == len(shapes)
        state.append([bucket.index(), bucket.is_last(), shapes, bucket.buffer().dtype])
        tensor = bucket.buffer() * 2 / dist.get_world_size()
        work = dist.all_reduce(tensor, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp = pycoll.DistributedDataParallel(Mixed())
    ddp.register_comm_hook(seen, hook)
    with pytest.raises(RuntimeError, match="only be called once"):
        ddp.register_comm_hook(None, hook)
    for _ in range(2):
        ddp.zero_grad()
        ddp(dist.get_rank() + 1.0).backward()
    assert torch.equal(ddp.module.a.grad, torch.full((3, 2), 3.0))
    assert torch.equal(ddp.module.b.grad, torch.full((5,), 3 + 6j, dtype=torch.complex64))
    return seen[-2:]


def test_the_bucket_that_hooks_get(pool: Pools) -> None:
    for first, second in pool(2).run(buckets_as_hooks_see_them):
        assert [first[0], second[0]] == [0, 1]
        assert [first[1], second[1]] == [False, True]
        assert first[3] is second[3] is torch.float32
        assert sorted([first[2], second[2]]) == [[(3, 2)], [(5, 2)]]


def bad_hooks() -> list[str]:
    def no_future(state: Any, bucket: Any) -> Any:
        return bucket.buffer()

    def too_short(state: Any, bucket: Any) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(bucket.buffer()[:3])
        return future

    def raising(state: Any, bucket: Any) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_exception(OSError("no more paper"))
        return future

    texts = []
    for hook in (no_future, too_short, raising):
        ddp = pycoll.DistributedDataParallel(make_model())
        ddp.register_comm_hook(None, hook)
        try:
            loss_of(ddp, batch(0, 0)).backward()
        except (RuntimeError, TypeError) as error:
            texts.append(str(error))
    with pytest.raises(TypeError, match="cannot be called"):
        pycoll.DistributedDataParallel(make_model()).register_comm_hook(None, 3)
    return texts


def test_hooks_that_give_something_else(pool: Pools) -> None:
    (texts,) = pool(1).run(bad_hooks)
    assert "Future" in texts[0]
    assert "bucket 0" in texts[1]
    assert "no more paper" in texts[2]


# --- 8 bits ----------------------------------------------------------------------------------------


def bytes_moved(group: Any) -> int:
    return sum(e["bytes_written"] + e["bytes_read"] for e in pycoll.events(group))


def train_quantised(kind: type[QuantisedState]) -> tuple[bool, int, int]:
    """Whether gradients are equal on all ranks; bytes that this rank moves with the hook, and without."""
    wide = nn.Linear(1000, 400, bias=False)
    ddp = pycoll.DistributedDataParallel(wide)
    ddp(torch.randn(2, 1000)).sum().backward()
    # The last one of the sum's size; before it the weights went round.
    plain = next(e for e in pycoll.events()[::-1] if e["nbytes"] == wide.weight.numel() * 4)
    state = kind()
    ddp.register_comm_hook(state, quantised_hook)
    ddp.zero_grad()
    ddp(torch.randn(2, 1000)).sum().backward()
    return (
        equal_on_all_ranks([wide.weight.grad]),
        bytes_moved(state.group),
        plain["bytes_written"] + plain["bytes_read"],
    )


@pytest.mark.parametrize("kind", [Int8State, Float8State])
def test_quantised_hooks_move_a_quarter(pool: Pools, kind: type[QuantisedState]) -> None:
    for world_size in (2, 3):
        for equal, moved, plain in pool(world_size).run(train_quantised, kind):
            assert equal
            assert moved * 3.9 <= plain, plain / moved


def sums_of_means(kind: type[QuantisedState], feedback: bool) -> float:
    """How far the sum of 60 quantised means is from 60 times the true one, in units of the gradient's size."""
    ddp = pycoll.DistributedDataParallel(nn.Linear(300, 3, bias=False))
    ddp.register_comm_hook(kind(error_feedback=feedback), quantised_hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(1, 300, generator=generator) * torch.logspace(-3, 0, 300)
    total = torch.zeros(3, 300)
    for _ in range(60):
        ddp.zero_grad()
        ddp(x).sum().backward()
        total += ddp.module.weight.grad
    mean = x.expand(3, 300).clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return float((total / 60 - mean).abs().max())


@pytest.mark.parametrize("kind", [Int8State, Float8State])
def test_error_feedback_loses_nothing_over_many_steps(
    pool: Pools, kind: type[QuantisedState]
) -> None:
    (with_feedback, *_), (without, *_) = (
        pool(2).run(sums_of_means, kind, feedback) for feedback in (True, False)
    )
    assert with_feedback < without / 10
    assert with_feedback < 3e-3  # of gradients up to about 2


def losses_on_text(kind: type[QuantisedState] | None) -> list[float]:
    """Of a small GPT on the standard library's sources."""
    from pycoll.examples.gpt import GPT, PRESETS, next_character_loss
    from pycoll.examples.text import VOCABULARY, Corpus, standard_library_text

    corpus = Corpus.from_text(standard_library_text()[:200_000], 32)
    model = GPT(PRESETS["tiny"], len(VOCABULARY), seed=0)
    ddp = pycoll.DistributedDataParallel(model)
    if kind is not None:
        ddp.register_comm_hook(kind(), quantised_hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    losses = []
    for step in range(60):
        part = corpus.batch(step, 0, 8, 32, rank=dist.get_rank(), world_size=dist.get_world_size())
        optimizer.zero_grad()
        loss = next_character_loss(ddp(part.inputs), part.targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ddp.check_in_sync()
    return losses


def test_quantised_hooks_train_on_real_text(pool: Pools) -> None:
    plain = pool(2).run(losses_on_text, None)[0]
    assert sum(plain[-5:]) < 0.8 * sum(plain[:5])
    for kind in (Int8State, Float8State):
        quantised = pool(2).run(losses_on_text, kind)[0]
        assert abs(sum(quantised[-5:]) - sum(plain[-5:])) < 0.03 * sum(plain[-5:])


def test_small_models_train_through_hooks(pool: Pools) -> None:
    assert all(pool(2).run(train_with_allreduce_hook))


def train_with_allreduce_hook() -> bool:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    ddp = pycoll.DistributedDataParallel(make_model(), bucket_cap_mb=1e-3)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    train(ddp, make_optimizer(ddp.parameters()), 4)
    assert_close_to_alone(ddp.parameters(), 4)
    return equal_on_all_ranks(ddp.parameters())
