"""DistributedDataParallel and SyncBatchNorm: what went wrong for users of other wrappers, with results by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_model import equal_on_all_ranks
from torch import Tensor, nn

import pycoll
from pycoll.bucket import ParameterSpec, assign_buckets
from pycoll.testing import RankPool

pytestmark = pytest.mark.slow

Pools = Callable[[int], RankPool]
MIB = 1 << 20


class Weights(nn.Module):
    """Parameters p0, p1, … of given shapes, all ones; forward runs `compute` on them."""

    def __init__(self, *shapes: tuple[int, ...], dtypes: Any = None) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            dtype = torch.float32 if dtypes is None else dtypes[i]
            self.register_parameter(f"p{i}", nn.Parameter(torch.ones(shape, dtype=dtype)))

    def forward(self, compute: Callable[[Weights], Tensor]) -> Tensor:
        return compute(self)


def wrap(module: nn.Module, **how: Any) -> pycoll.DistributedDataParallel:
    return pycoll.DistributedDataParallel(module, **how)


def grads(module: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in module.parameters()]


def error_of(fn: Callable[[], Any]) -> str:
    try:
        fn()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


# --- parameters without gradient -------------------------------------------------------------------


def unused_parameters(as_view: bool, static: bool) -> list[Any]:
    rank = dist.get_rank()
    model = Weights((), (), ())
    how: dict[str, Any] = {"static_graph": static} if static else {"find_unused_parameters": True}
    ddp = wrap(model, gradient_as_bucket_view=as_view, **how)
    seen = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(lambda m: m.p0 * (rank + 1) + (10 * m.p1 if rank == 0 else 0)).backward()
        seen.append(grads(ddp))
    return seen


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_unused_parameters(pool: Pools, as_view: bool, static: bool) -> None:
    """None stays None where no rank has used a parameter; zeros of the ranks that have not count elsewhere."""
    for seen in pool(2).run(unused_parameters, as_view, static):
        assert seen == [[1.5, 5.0, None]] * 3


def momentum_of_unused(as_view: bool) -> bool:
    """A gradient that nobody has added to is not touched, not by a bit: a mean of thirds would be."""
    model = Weights((3,), (3,))
    ddp = wrap(model, find_unused_parameters=True, gradient_as_bucket_view=as_view)
    ddp(lambda m: (m.p0 * 0.1 + m.p1 * 0.1).sum()).backward()
    before = model.p1.grad.clone()
    for _ in range(4):
        model.p0.grad = None
        ddp(lambda m: m.p0.sum()).backward()
    return torch.equal(before, model.p1.grad) and grads(ddp)[0] == [1.0] * 3


@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_that_nobody_has_added_to(pool: Pools, as_view: bool) -> None:
    assert all(pool(3).run(momentum_of_unused, as_view))


def undeclared_unused() -> tuple[list[Any], str, str]:
    rank = dist.get_rank()
    ddp = wrap(Weights((), ()))
    ddp(lambda m: m.p0 * (rank + 1)).backward()
    first = grads(ddp)
    by_nobody = error_of(lambda: ddp(lambda m: m.p0))
    ddp = wrap(Weights((), ()))
    by_one = error_of(
        lambda: ddp(lambda m: m.p0 * (rank + 1) + (10 * m.p1 if rank == 0 else 0)).backward()
    )
    return first, by_nobody, by_one


def test_undeclared_unused_parameters_are_named_on_all_ranks(pool: Pools) -> None:
    for first, by_nobody, by_one in pool(2).run(undeclared_unused):
        assert first == [1.5, None]
        assert "'p1'" in by_nobody
        assert "find_unused_parameters" in by_nobody
        assert "'p1'" in by_one
        assert "rank 1" in by_one


def two_losses() -> list[Any]:
    """Each of two backward passes uses another head: together they use everything."""
    scale = dist.get_rank() + 1
    ddp = wrap(Weights((), (), ()))
    for _ in range(2):
        ddp.zero_grad()
        one, other = ddp(lambda m: (m.p0 * m.p1 * scale, m.p0 * m.p2 * scale * 3))
        one.backward(retain_graph=True)
        other.backward()
    return grads(ddp)


def test_heads_with_a_backward_pass_each(pool: Pools) -> None:
    assert pool(2).run(two_losses) == [[6.0, 1.5, 4.5]] * 2


# --- accumulation ----------------------------------------------------------------------------------


def accumulated(as_view: bool) -> dict[str, Any]:
    scale = float(dist.get_rank() + 1)
    ddp = wrap(Weights(()), gradient_as_bucket_view=as_view)

    def forward(k: float) -> Tensor:
        return ddp(lambda m: m.p0 * k * scale)

    seen: dict[str, Any] = {}
    with ddp.no_sync():
        forward(1).backward()
        forward(2).backward()
    seen["mid"] = grads(ddp)
    forward(4).backward()
    seen["final"] = grads(ddp)
    ddp.zero_grad()
    loss = forward(1)
    with ddp.no_sync():
        loss.backward()
    seen["forward outside"] = grads(ddp)
    ddp.zero_grad()
    with ddp.no_sync():
        loss = forward(1)
    loss.backward()
    seen["forward inside"] = grads(ddp)
    ddp.zero_grad()
    with ddp.no_sync():
        with ddp.no_sync():
            forward(1).backward()
        forward(1).backward()
    seen["nested"] = grads(ddp)
    ddp.zero_grad()
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError
    forward(1).backward()
    seen["after an exception"] = grads(ddp)
    ddp.zero_grad()
    with ddp.no_sync():
        apart = forward(1)
    together = forward(2)
    together.backward()
    apart.backward()
    seen["mixed"] = grads(ddp)
    return seen


@pytest.mark.parametrize("as_view", [False, True])
def test_no_sync(pool: Pools, as_view: bool) -> None:
    for rank, seen in enumerate(pool(2).run(accumulated, as_view)):
        scale = rank + 1.0
        assert seen == {
            "mid": [3 * scale],
            "final": [10.5],
            "forward outside": [1.5],
            "forward inside": [scale],
            "nested": [2 * scale],
            "after an exception": [1.5],
            "mixed": [3.0 + scale],
        }


def several_backwards(as_view: bool) -> list[list[Any]]:
    scale = float(dist.get_rank() + 1)
    ddp = wrap(Weights((2,)), gradient_as_bucket_view=as_view)
    loss = ddp(lambda m: (m.p0 * scale).sum())
    loss.backward(retain_graph=True)
    seen = [grads(ddp)]
    loss.backward()
    seen.append(grads(ddp))
    for set_to_none in (True, False):
        ddp.zero_grad(set_to_none=set_to_none)
        losses = [ddp(lambda m: (m.p0 * scale).sum()) for _ in range(3)]
        for loss in losses:
            loss.backward()
        seen.append(grads(ddp))
    return seen


@pytest.mark.parametrize("as_view", [False, True])
def test_several_backward_passes(pool: Pools, as_view: bool) -> None:
    """Through one forward, and of several forwards: others reduce the first one only."""
    for seen in pool(2).run(several_backwards, as_view):
        assert seen == [[[1.5, 1.5]], [[3.0, 3.0]], [[4.5, 4.5]], [[4.5, 4.5]]]


# --- buffers ---------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """A batch norm, buffers of many dtypes that ranks move apart, and one that the graph needs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.linear = nn.Linear(2, 2)
        rank = float(dist.get_rank())
        for name, dtype in (("i", torch.int64), ("h", torch.float16), ("b", torch.bool)):
            self.register_buffer(name, torch.tensor([rank + 1, rank, 0]).to(dtype))
        self.register_buffer("scalar", torch.tensor(rank, dtype=torch.complex128))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)) * self.scale


def two_forwards(broadcast: bool) -> tuple[list[Tensor], dict[str, Tensor], bool]:
    torch.manual_seed(3)
    model = Buffered()
    ddp = wrap(model, broadcast_buffers=broadcast)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(4, 2, generator=generator)
    loss = ddp(x).sum() + ddp(2 * x).pow(2).sum()
    loss.backward()
    gradients = [p.grad.clone() for p in ddp.parameters()]
    if dist.get_rank() == 1:
        model.i += 5
        model.h.zero_()
    ddp(x)  # takes rank 0's buffers before it updates running statistics
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    same = equal_on_all_ranks([model.i, model.h.float(), model.b, model.scalar.real])
    return gradients, state, same


def test_two_forwards_before_one_backward(pool: Pools) -> None:
    with_broadcast = pool(2).run(two_forwards, True)
    without = pool(2).run(two_forwards, False)
    for (mine, state, same), (expected, _, _) in zip(with_broadcast, without, strict=True):
        for a, b in zip(mine, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert same
        assert int(state["norm.num_batches_tracked"]) == 3
        assert state["i"].tolist() == [1, 0, 0]
        assert state["h"].dtype is torch.float16
    # Before the last forward the running statistics of rank 1 became those of rank 0.
    assert not torch.equal(
        with_broadcast[1][1]["norm.running_mean"], without[1][1]["norm.running_mean"]
    )


# --- sparse gradients ------------------------------------------------------------------------------


def sparse_gradients(as_view: bool) -> list[Any]:
    rank = dist.get_rank()
    seen = []
    for padding, rows in ((None, ([0, 1, 1], [1, 4])), (0, ([0, 0], [1, 4])), (None, ([], []))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 2, sparse=True, padding_idx=padding))
        ddp = wrap(model, gradient_as_bucket_view=as_view)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.tensor(rows[rank], dtype=torch.int64)).sum().backward()
        grad = model[0].weight.grad
        assert grad.is_sparse
        assert grad.is_coalesced()
        seen.append(grad.to_dense()[:, 0].tolist())
    return seen


@pytest.mark.parametrize("as_view", [False, True])
def test_sparse_gradients(pool: Pools, as_view: bool) -> None:
    expected = [[0.5, 1.5, 0, 0, 0.5], [0, 0.5, 0, 0, 0.5], [0.0] * 5]
    assert pool(2).run(sparse_gradients, as_view) == [expected] * 2


# --- dtypes ----------------------------------------------------------------------------------------

DTYPES = (torch.float16, torch.float32, torch.bfloat16, torch.float64, torch.complex64)


def mixed_dtypes(cap_mb: float, as_view: bool) -> list[Any]:
    scale = dist.get_rank() + 1
    shapes = [(3,), (0,), (1,), (7,)]
    chosen = [(shape, dtype) for shape in shapes for dtype in DTYPES]
    model = Weights(*(s for s, _ in chosen), dtypes=[d for _, d in chosen])
    ddp = wrap(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=as_view)

    def compute(m: Weights) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for index, p in enumerate(m.parameters()):
            if not p.is_complex():
                total = total + (p * scale).sum()
            elif index < 10:  # the gradient is the conjugate's
                total = total + (p * scale * (1 - 1j)).sum().real
            else:
                total = total + (p * scale * -1j).sum().real
        return total

    for _ in range(2):
        ddp.zero_grad()
        ddp(compute).backward()
    assert all(p.grad.dtype == p.dtype for p in ddp.parameters())
    return grads(ddp)


@pytest.mark.parametrize("as_view", [False, True])
def test_mixed_dtypes(pool: Pools, as_view: bool) -> None:
    for cap_mb in (1e-6, 25.0, 1000.0):
        for got in pool(2).run(mixed_dtypes, cap_mb, as_view):
            for index, (size, dtype) in enumerate(itertools.product((3, 0, 1, 7), DTYPES)):
                value = 1.5 if not dtype.is_complex else (1.5 + 1.5j if index < 10 else 1.5j)
                assert got[index] == [value] * size


def test_buckets_are_split_by_dtype() -> None:
    cpu = torch.device("cpu")
    kinds = [torch.float32, torch.float16, torch.float32, torch.float16]
    specs = [ParameterSpec(f"p{i}", 8, (kind, cpu)) for i, kind in enumerate(kinds)]
    assert assign_buckets(specs, [MIB]) == [[0, 2], [1, 3]]


# --- past the wrapper ------------------------------------------------------------------------------


def past_the_wrapper() -> tuple[list[Any], bool, str, str]:
    scale = float(dist.get_rank() + 1)
    ddp = wrap(Weights((), ()))
    ddp.module(lambda m: m.p0 * scale + m.p1 * scale).backward()
    seen = grads(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        ddp.module(lambda m: m.p0 * scale + m.p1 * scale).backward()
        optimizer.step()
    equal = equal_on_all_ranks(ddp.parameters())
    in_sync = error_of(ddp.check_in_sync)
    with torch.no_grad():
        ddp.module.p1 += dist.get_rank() % 2
    return seen, equal, in_sync, error_of(ddp.check_in_sync)


def test_losses_past_the_wrapper(pool: Pools) -> None:
    for seen, equal, in_sync, apart in pool(2).run(past_the_wrapper):
        assert seen == [1.5, 1.5]
        assert equal
        assert in_sync == ""
        assert "'p1'" in apart
        assert "rank 1" in apart


# --- models that differ ----------------------------------------------------------------------------


def differing(kind: str, odd: int) -> str:
    is_odd = dist.get_rank() == odd
    if kind == "number":
        model = Weights((2, 3), (4,)) if is_odd else Weights((2, 3))
    elif kind == "shape":
        model = Weights((1,), (3, 2) if is_odd else (2, 3))
    elif kind == "dtype":
        model = Weights(
            (1,), (2,), dtypes=[torch.float32, torch.float64 if is_odd else torch.float32]
        )
    elif kind == "order":
        model = nn.Module()
        for name in ("a", "b")[:: -1 if is_odd else 1]:
            model.register_parameter(name, nn.Parameter(torch.ones(2)))
    elif kind == "requires_grad":
        model = Weights((1,), (2,))
        model.p1.requires_grad_(not is_odd)
    elif kind == "none trainable":
        model = Weights((1,))
        model.p0.requires_grad_(not is_odd)
    elif kind == "ignored":
        model = Weights((1,), (2,), (2,))
        names = ["p1" if is_odd else "p2"]
        pycoll.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    else:
        model = Weights((1,))
    return error_of(lambda: wrap(model, find_unused_parameters=kind == "setting" and is_odd))


NAMED = {
    "number": ["'p1'", "2", "1"],
    "shape": ["'p1'", "(3, 2)", "(2, 3)"],
    "dtype": ["'p1'", "float64", "float32"],
    "order": ["'a'", "'b'"],
    "requires_grad": ["'p1'", "requires_grad=False"],
    "none trainable": ["'p0'", "requires_grad=False"],
    "ignored": ["'p1'", "'p2'"],
    "setting": ["find_unused_parameters", "True", "False"],
}


@pytest.mark.parametrize(("world_size", "odd"), [(2, 1), (3, 2), (3, 0)])
def test_models_that_differ(pool: Pools, world_size: int, odd: int) -> None:
    """All ranks raise the same text: who differs, in which parameter, and both values."""
    for kind, named in NAMED.items():
        texts = pool(world_size).run(differing, kind, odd)
        assert len(set(texts)) == 1, texts
        for part in [*named, f"rank {odd}"]:
            assert part in texts[0], (kind, texts[0])


# --- other orders ----------------------------------------------------------------------------------


class Branches(nn.Module):
    """Forty parameters; which branch runs, and in which order, is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ParameterList([torch.full((i % 7 + 1,), 1.0) for i in range(20)])
        self.b = nn.ParameterList([torch.full((i % 5 + 1,), 1.0) for i in range(20)])

    def forward(self, x: Tensor, order: str) -> Tensor:
        for name in order:
            for number, p in enumerate(getattr(self, name)):
                x = x + (p * (number + 1)).sum() * x.new_ones(())
        return x


def other_orders(skip: bool, slow: bool) -> list[Any]:
    rank = dist.get_rank()
    ddp = wrap(Branches(), bucket_cap_mb=1e-4, find_unused_parameters=skip)
    order = "ab" if rank == 0 else ("a" if skip else "ba")
    for step in range(3):
        ddp.zero_grad()
        if slow and step == 0 and rank == 1:
            import time

            time.sleep(0.2)
        (ddp(torch.zeros(()), order) * (rank + 1)).backward()
    assert len(ddp.reducer.buckets) >= 5
    return [p.grad[0].item() for p in ddp.parameters()]


def test_ranks_with_other_orders(pool: Pools) -> None:
    for skip, slow in ((False, True), (True, False)):
        for got in pool(2).run(other_orders, skip, slow):
            factors = (1.5, 0.5 if skip else 1.5)
            assert got == [f * (k + 1) for f in factors for k in range(20)]


# --- small shapes ----------------------------------------------------------------------------------


def small_shapes(as_view: bool) -> list[Any]:
    scale = float(dist.get_rank() + 1)
    seen: list[Any] = []
    for shapes in (((0,), (2,)), ((), (2,)), ((0,), (0, 3))):
        for cap in (25.0, 1e-6):
            ddp = wrap(Weights(*shapes), gradient_as_bucket_view=as_view, bucket_cap_mb=cap)
            for _ in range(2):
                ddp.zero_grad()
                if shapes[0] == ():
                    ddp(lambda m: (m.p0 * m.p1 * scale).sum()).backward()
                else:
                    ddp(lambda m: m.p0.sum() + m.p1.sum() * scale).backward()
            seen.append(grads(ddp))
    frozen = Weights((2,))
    frozen.p0.requires_grad_(False)
    seen.append(error_of(lambda: wrap(frozen)))
    return seen


@pytest.mark.parametrize("as_view", [False, True])
def test_small_shapes(pool: Pools, as_view: bool) -> None:
    for seen in pool(2).run(small_shapes, as_view):
        assert seen[:2] == [[[], [1.5, 1.5]]] * 2
        assert seen[2:4] == [[3.0, [1.5, 1.5]]] * 2
        assert seen[4:6] == [[[], []]] * 2
        assert "DistributedDataParallel is not needed" in seen[6]
