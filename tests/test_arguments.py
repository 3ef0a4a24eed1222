"""Arguments that cannot be right: an error on every rank that names them, and a group that still works."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_runner import BACKEND, all_gather_into_tensor, reduce_op, reduce_scatter_tensor
from checker import assert_same_bits
from generator import DTYPES

from pycoll import reference
from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]
Call = Callable[[], Any]

pytestmark = pytest.mark.skipif(BACKEND != "pycoll", reason="these messages are pycoll's")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


# Name: the call, the kind of error, and what its message has to contain (patterns of words).
WRONG: dict[str, tuple[Call, type[Exception] | tuple[type[Exception], ...], Sequence[str]]] = {
    "input that does not divide": (
        lambda: reduce_scatter_tensor(zeros(2), zeros(5)),
        ValueError,
        ("2", "5"),
    ),
    "output larger than a chunk": (
        lambda: reduce_scatter_tensor(zeros(3), zeros(4)),
        ValueError,
        ("3", "4", "2"),
    ),
    "output too small for all inputs": (
        lambda: all_gather_into_tensor(zeros(3), zeros(2)),
        ValueError,
        ("3", "2"),
    ),
    "output of another dtype": (
        lambda: all_gather_into_tensor(zeros(4, dtype=torch.float64), zeros(2)),
        (ValueError, TypeError),
        ("float64|double", "float32|float"),
    ),
    "scattered output of another dtype": (
        lambda: reduce_scatter_tensor(zeros(2, dtype=torch.int32), zeros(4)),
        (ValueError, TypeError),
        ("int32|int", "float32|float"),
    ),
    "too few outputs": (
        lambda: dist.all_gather([zeros(3)], zeros(3)),
        ValueError,
        ("1", "2"),
    ),
    "an output of another size": (
        lambda: dist.all_gather([zeros(3), zeros(4)], zeros(3)),
        ValueError,
        ("3", "4"),
    ),
    "too many inputs": (
        lambda: dist.reduce_scatter(zeros(3), [zeros(3)] * 3),
        ValueError,
        ("3", "2"),
    ),
    "an input of another size": (
        lambda: dist.reduce_scatter(zeros(3), [zeros(3), zeros(7)]),
        ValueError,
        ("3", "7"),
    ),
    "one output twice": (
        lambda: dist.all_gather([zeros(2)] * 2, zeros(2)),
        ValueError,
        ("overlap",),
    ),
    "outputs that overlap": (
        lambda: dist.all_gather(overlapping(), zeros(2)),
        ValueError,
        ("overlap",),
    ),
    "a root outside the group": (
        lambda: dist.broadcast(zeros(2), group_src=2),
        ValueError,
        ("2",),
    ),
    "a sparse tensor": (
        lambda: dist.broadcast(torch.eye(2).to_sparse(), 0),
        (ValueError, TypeError, RuntimeError),
        ("sparse",),
    ),
}


def overlapping() -> list[torch.Tensor]:
    buffer = zeros(3)
    return [buffer[:2], buffer[1:]]


# --- on ranks --------------------------------------------------------------------------------------


def call_wrongly(name: str) -> tuple[Exception | None, float]:
    """The error that was raised, and a sum of ones computed afterwards."""
    call = WRONG[name][0]
    error = None
    try:
        call()
    except Exception as raised:
        error = raised
    after = torch.ones(1)
    dist.all_reduce(after)
    return error, after.item()


def reduce_what_cannot_be_reduced(dtype: torch.dtype, op: str) -> list[object]:
    """The errors of two collectives, and a sum of ones computed afterwards."""
    source, target = torch.ones(4).to(dtype), torch.zeros(2).to(dtype)
    calls: tuple[Call, ...] = (
        lambda: dist.all_reduce(source, reduce_op(op)),
        lambda: reduce_scatter_tensor(target, source, reduce_op(op)),
    )
    errors: list[Exception | None] = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
        else:
            errors.append(None)
    assert_same_bits(source, torch.ones(4).to(dtype), "the tensor to reduce")
    assert_same_bits(target, torch.zeros(2).to(dtype), "the tensor to scatter into")
    after = torch.ones(1)
    dist.all_reduce(after)
    return [errors, after.item()]


def reduce_into_an_expanded_tensor() -> list[Any]:
    tensor = torch.full((1,), dist.get_rank() + 1.0).expand(4)
    message = None
    try:
        dist.all_reduce(tensor)
    except (ValueError, RuntimeError) as error:
        message = str(error)
    return [message, tensor.tolist(), dist.get_rank() + 1.0]


def operations_without_elements(is_async: bool) -> float:
    n = dist.get_world_size()
    works = [
        dist.all_reduce(zeros(0, 3), async_op=is_async),
        dist.all_gather([zeros(1, 0, 2) for _ in range(n)], zeros(1, 0, 2), async_op=is_async),
        all_gather_into_tensor(zeros(0), zeros(0), async_op=is_async),
        reduce_scatter_tensor(zeros(0), zeros(0), async_op=is_async),
        dist.broadcast(zeros(0), 0, async_op=is_async),
    ]
    for work in works:
        if work is not None:
            work.wait()
    after = torch.ones(1)
    dist.all_reduce(after)
    return after.item()


# --- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_on_every_rank(pool: Pools, name: str) -> None:
    _, kind, words = WRONG[name]
    for error, after in pool(2).run(call_wrongly, name):
        assert isinstance(error, kind), error
        for word in words:
            assert re.search(rf"\b({word})", str(error), re.IGNORECASE), f"{word} in {error}"
        assert after == 2.0


@pytest.mark.parametrize("op", reference.OPS)
def test_an_op_without_meaning_for_the_dtype_is_refused(pool: Pools, op: str) -> None:
    refused = [dtype for dtype in DTYPES if not reference.is_valid(op, dtype)]
    for dtype in refused:
        for errors, after in pool(2).run(reduce_what_cannot_be_reduced, dtype, op):
            assert all(isinstance(e, (ValueError, TypeError, RuntimeError)) for e in errors)
            for error in errors:
                assert op in str(error).lower(), error
            assert after == 2.0
    if op in ("sum", "product"):
        assert not refused


def test_an_overlapping_destination_is_reduced_or_refused(pool: Pools) -> None:
    for message, values, own in pool(2).run(reduce_into_an_expanded_tensor):
        if message is None:
            assert values == [3.0] * 4
        else:
            assert "overlap" in message
            assert values == [own] * 4


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_operations_without_elements_keep_ranks_in_step(
    pool: Pools, world_size: int, is_async: bool
) -> None:
    assert pool(world_size).run(operations_without_elements, is_async) == [world_size] * world_size
