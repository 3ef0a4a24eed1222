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
    "too many inputs": (
        lambda: dist.reduce_scatter(zeros(3), [zeros(3)] * 3),
        ValueError,
        ("3", "2"),
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
    "an output whose rows overlap": (
        lambda: dist.broadcast(torch.zeros(8).unfold(0, 4, 2), 0),
        (ValueError, RuntimeError),  # the root only reads, and hears of the others
        ("overlap",),
    ),
    "rows that overlap, of a sum": (
        lambda: dist.all_reduce(torch.zeros(3).as_strided((2, 2), (1, 1))),
        ValueError,
        ("overlap",),
    ),
    "rows that overlap here and there": (
        lambda: dist.all_reduce(torch.zeros(22).as_strided((3, 4), (6, 3))),
        ValueError,
        ("overlap",),
    ),
    "splits whose sum wraps around": (
        lambda: dist.all_to_all_single(
            zeros(2), zeros(2), [2**63 - 1, 2**63 - 1], [2**63 - 1, 2**63 - 1]
        ),
        ValueError,
        ("input_split_sizes", "9223372036854775807", "larger than any tensor"),
    ),
    "a copy for which there is no memory": (
        lambda: (
            dist.all_reduce(torch.tensor(1.0).expand(2**40))
            if dist.get_rank() == 1
            else dist.broadcast(torch.tensor(1.0).expand(2**40), 0)
        ),
        (ValueError, RuntimeError),
        ("overlaps itself|allocate",),
    ),
    "too few tensors to exchange": (
        lambda: dist.all_to_all([zeros(3)], [zeros(3)] * 2),
        ValueError,
        ("1", "2"),
    ),
    "received tensors that overlap": (
        lambda: dist.all_to_all(overlapping(), [zeros(2), zeros(2)]),
        ValueError,
        ("overlap",),
    ),
    "a received tensor that is sent as well": (
        lambda: exchange_in_place(dist.all_to_all_single),
        ValueError,
        ("shares memory",),
    ),
    "rows that do not divide": (
        lambda: dist.all_to_all_single(zeros(3), zeros(3)),
        ValueError,
        ("3", "2", "input_split_sizes"),
    ),
    "a negative split": (
        lambda: dist.all_to_all_single(zeros(1), zeros(1), [2, -1], [2, -1]),
        ValueError,
        ("input_split_sizes", "negative"),
    ),
    "splits of more rows than there are": (
        lambda: dist.all_to_all_single(zeros(3), zeros(3), [2, 2], [2, 2]),
        ValueError,
        ("input_split_sizes", "4", "3"),
    ),
    "too few splits": (
        lambda: dist.all_to_all_single(zeros(3), zeros(3), [3], [3]),
        ValueError,
        ("input_split_sizes", "1", "2"),
    ),
    "a destination outside the group": (
        lambda: dist.reduce(zeros(2), group_dst=2),
        ValueError,
        ("2",),
    ),
    "a dtype that has no arithmetic": (
        lambda: dist.all_reduce(zeros(2, dtype=torch.uint8).view(torch.float8_e8m0fnu)),
        ValueError,
        ("float8_e8m0fnu", "does not reduce"),
    ),
    "an op that does not exist": (
        lambda: dist.all_reduce(zeros(2), dist.ReduceOp(dist.ReduceOp.RedOpType(99))),
        ValueError,
        ("99", "SUM"),
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


# Only one rank can see that its arguments are wrong: it says so, and the others repeat it.
WRONG_ON_ONE_RANK: dict[str, tuple[Call, Sequence[str]]] = {
    "an own output of another size": (
        lambda: dist.all_gather([zeros(3), zeros(4)], zeros(3)),
        ("3", "4"),
    ),
    "an own input of another size": (
        lambda: dist.reduce_scatter(zeros(3), [zeros(3), zeros(7)]),
        ("3", "7"),
    ),
    "a gathered output of another size": (
        lambda: dist.gather(zeros(3), at_root([zeros(3), zeros(4)]), group_dst=0),
        ("3", "4"),
    ),
    "too few gathered outputs": (
        lambda: dist.gather(zeros(3), at_root([zeros(3)]), group_dst=0),
        ("1", "2"),
    ),
    "gathered outputs that overlap": (
        lambda: dist.gather(zeros(2), at_root(overlapping()), group_dst=0),
        ("overlap",),
    ),
    "a scattered input of another size": (
        lambda: dist.scatter(zeros(3), at_root([zeros(3), zeros(4)]), group_src=0),
        ("3", "4"),
    ),
    "too many scattered inputs": (
        lambda: dist.scatter(zeros(3), at_root([zeros(3)] * 3), group_src=0),
        ("3", "2"),
    ),
    "a destination that overlaps itself": (
        lambda: dist.reduce(zeros(1).expand(4), group_dst=0),
        ("overlap",),
    ),
}


def at_root(value: Any) -> Any:
    return value if dist.get_rank() == 0 else None


def exchange_in_place(exchange: Callable[..., Any]) -> None:
    tensor = zeros(4)
    exchange(tensor, tensor)


def overlapping() -> list[torch.Tensor]:
    buffer = zeros(3)
    return [buffer[:2], buffer[1:]]


# --- on ranks --------------------------------------------------------------------------------------


def call_wrongly(name: str) -> tuple[Exception | None, float]:
    """The error that was raised, and a sum of ones computed afterwards."""
    call = (WRONG.get(name) or WRONG_ON_ONE_RANK[name])[0]
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


# Each writes the result for both ranks into one element that is seen four times.
INTO_EXPANDED: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "all_gather": lambda tensor: dist.all_gather([tensor, zeros(4)], zeros(4)),
    "all_gather_into_tensor": lambda tensor: all_gather_into_tensor(tensor, zeros(2)),
    "reduce_scatter": lambda tensor: dist.reduce_scatter(tensor, [zeros(4)] * 2),
    "reduce_scatter_tensor": lambda tensor: reduce_scatter_tensor(tensor, zeros(8)),
    "scatter": lambda tensor: dist.scatter(tensor, at_root([zeros(4)] * 2), 0),
    "all_to_all": lambda tensor: dist.all_to_all([tensor, zeros(4)], [zeros(4)] * 2),
    "all_to_all_single": lambda tensor: dist.all_to_all_single(tensor, zeros(4)),
}


def write_into_an_expanded_tensor(name: str) -> tuple[str, list[float], float]:
    """What was raised, the tensor afterwards, and a sum of ones computed afterwards."""
    tensor = torch.full((1,), dist.get_rank() + 1.0).expand(4)
    message = "nothing was raised"
    try:
        INTO_EXPANDED[name](tensor)
    except (ValueError, RuntimeError) as error:
        message = str(error)
    after = torch.ones(1)
    dist.all_reduce(after)
    return message, tensor.tolist(), after.item()


def reduce_what_only_others_expand() -> list[float]:
    """To reduce, ranks that are not the destination only read."""
    rank = dist.get_rank()
    tensor = torch.full((1,), rank + 1.0).expand(4)
    tensor = tensor.clone() if rank == 0 else tensor
    dist.reduce(tensor, 0)
    return tensor.tolist()


def operations_without_elements(is_async: bool) -> float:
    n = dist.get_world_size()
    works = [
        dist.all_reduce(zeros(0, 3), async_op=is_async),
        dist.all_gather([zeros(1, 0, 2) for _ in range(n)], zeros(1, 0, 2), async_op=is_async),
        all_gather_into_tensor(zeros(0), zeros(0), async_op=is_async),
        reduce_scatter_tensor(zeros(0), zeros(0), async_op=is_async),
        dist.broadcast(zeros(0), 0, async_op=is_async),
        dist.reduce(zeros(2, 0), n - 1, async_op=is_async),
        dist.gather(zeros(0), at_root([zeros(0) for _ in range(n)]), 0, async_op=is_async),
        dist.scatter(zeros(0), at_root([zeros(0) for _ in range(n)]), 0, async_op=is_async),
        dist.all_to_all([zeros(0) for _ in range(n)], [zeros(0, 3)] * n, async_op=is_async),
        dist.all_to_all_single(zeros(0, 5), zeros(0, 5), async_op=is_async),
        dist.all_to_all_single(zeros(0), zeros(0), [0] * n, [0] * n, async_op=is_async),
        dist.all_reduce_coalesced([zeros(0), zeros(0, 2)], async_op=is_async),
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


@pytest.mark.parametrize("name", WRONG_ON_ONE_RANK)
def test_what_one_rank_refuses_reaches_every_rank(pool: Pools, name: str) -> None:
    _, words = WRONG_ON_ONE_RANK[name]
    results = pool(2).run(call_wrongly, name)
    (refusing,) = [r for r, (error, _) in enumerate(results) if isinstance(error, ValueError)]
    for rank, (error, after) in enumerate(results):
        if rank != refusing:
            assert isinstance(error, RuntimeError)
            assert f"rank {refusing} refused its arguments" in str(error)
        for word in words:
            assert re.search(rf"\b{word}", str(error)), f"{word} in {error}"
        assert after == 2.0


@pytest.mark.parametrize("name", INTO_EXPANDED)
def test_a_destination_that_overlaps_itself_is_refused(pool: Pools, name: str) -> None:
    """Others reduce a contiguous copy, throw it away and return the tensor as it was."""
    for rank, (message, values, after) in enumerate(
        pool(2).run(write_into_an_expanded_tensor, name)
    ):
        if name == "broadcast" and rank == 0:
            assert "rank 1 refused its arguments" in message
        assert "overlap" in message
        assert values == [rank + 1.0] * 4
        assert after == 2.0


def test_a_source_that_overlaps_itself_is_reduced(pool: Pools) -> None:
    assert pool(3).run(reduce_what_only_others_expand) == [[6.0] * 4, [2.0] * 4, [3.0] * 4]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_operations_without_elements_keep_ranks_in_step(
    pool: Pools, world_size: int, is_async: bool
) -> None:
    assert pool(world_size).run(operations_without_elements, is_async) == [world_size] * world_size
