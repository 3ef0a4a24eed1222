"""Ranks that disagree, and what autograd sees: others answer with wrong numbers, or hang.

Arguments that one rank can see to be wrong are in `test_arguments`; messages of another size or dtype
in `test_point_to_point`; differentiable collectives in `test_functional`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_runner import all_gather_into_tensor, reduce_scatter_tensor
from checker import assert_same_bits
from torch import Tensor

from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]
F32, F64, I32, I64 = torch.float32, torch.float64, torch.int32, torch.int64
MAX, SUM, AVG = dist.ReduceOp.MAX, dist.ReduceOp.SUM, dist.ReduceOp.AVG


@dataclass
class Tensors:
    """Makes tensors whose values depend on the rank, and knows what they were."""

    rank: int
    n: int
    made: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, numel: int, dtype: torch.dtype = F32) -> Tensor:
        values = (torch.arange(numel) % 100 + 20 * self.rank + len(self.made)).to(dtype)
        self.made.append((values.clone(), values))
        return self.made[-1][0]

    def listed(self, numel: int, dtype: torch.dtype = F32) -> list[Tensor]:
        return [self(numel, dtype) for _ in range(self.n)]

    def at(self, root: int, numel: int, dtype: torch.dtype = F32) -> list[Tensor] | None:
        return self.listed(numel, dtype) if self.rank == root else None

    def expect_untouched(self) -> None:
        for tensor, values in self.made:
            assert_same_bits(tensor, values, "user memory")


Call = Callable[[Tensors], Any]


def all_reduce(numel: int, dtype: torch.dtype = F32, op: Any = SUM) -> Call:
    return lambda t: dist.all_reduce(t(numel, dtype), op)


def reduce(numel: int, dtype: torch.dtype = F32, op: Any = SUM, root: int = 0) -> Call:
    return lambda t: dist.reduce(t(numel, dtype), root, op)


def broadcast(numel: int, dtype: torch.dtype = F32, root: int = 0) -> Call:
    return lambda t: dist.broadcast(t(numel, dtype), root)


def gather(numel: int, dtype: torch.dtype = F32, root: int = 0) -> Call:
    return lambda t: dist.gather(t(numel, dtype), t.at(root, numel, dtype), root)


def scatter(numel: int, dtype: torch.dtype = F32, root: int = 0) -> Call:
    return lambda t: dist.scatter(t(numel, dtype), t.at(root, numel, dtype), root)


def all_gather(numel: int, dtype: torch.dtype = F32) -> Call:
    return lambda t: all_gather_into_tensor(t(numel * t.n, dtype), t(numel, dtype))


def gather_lists(numels: list[int]) -> Call:
    """Rank r brings numels[r] elements, as all ranks ought to know."""
    return lambda t: dist.all_gather([t(m) for m in numels[: t.n]], t(numels[t.rank]))


def reduce_scatter(numel: int, dtype: torch.dtype = F32, op: Any = SUM) -> Call:
    return lambda t: reduce_scatter_tensor(t(numel, dtype), t(numel * t.n, dtype), op)


def all_to_all(numel: int, dtype: torch.dtype = F32) -> Call:
    return lambda t: dist.all_to_all_single(t(numel * t.n, dtype), t(numel * t.n, dtype))


def coalesced(*numels: int) -> Call:
    return lambda t: dist.all_reduce_coalesced([t(numel) for numel in numels])


def barrier(t: Tensors) -> None:
    dist.barrier()


# What all ranks but the last call, what the last one calls, and how both are to be named.
DIFFERENT: list[tuple[Call, Call, str, str]] = [
    # Dtypes, of equally many bytes and of others.
    (
        all_reduce(4, I32),
        all_reduce(4),
        "all_reduce(4 x int32, SUM)",
        "all_reduce(4 x float32, SUM)",
    ),
    (
        all_reduce(4, torch.bfloat16),
        all_reduce(4, torch.half),
        "all_reduce(4 x bfloat16, SUM)",
        "all_reduce(4 x float16, SUM)",
    ),
    (
        broadcast(6),
        broadcast(14, I64),
        "broadcast(6 x float32, root 0)",
        "broadcast(14 x int64, root 0)",
    ),
    (reduce(4, F64), reduce(4, I64), "reduce(4 x float64, SUM, root 0)", "reduce(4 x int64, SUM"),
    (gather(4, I32), gather(4), "gather(4 x int32, root 0)", "gather(4 x float32, root 0)"),
    (scatter(4, I32), scatter(4), "scatter(4 x int32, root 0)", "scatter(4 x float32, root 0)"),
    (all_gather(4, I32), all_gather(4), "all_gather(4 x int32)", "all_gather(4 x float32)"),
    (reduce_scatter(4, I32), reduce_scatter(4), "reduce_scatter(4 x int32, ", "(4 x float32, "),
    (all_to_all(4, I32), all_to_all(4), "all_to_all(int32)", "all_to_all(float32)"),
    # Counts.
    (all_reduce(4), all_reduce(6), "all_reduce(4 x float32, SUM)", "all_reduce(6 x float32, SUM)"),
    (all_reduce(1), all_reduce(2), "all_reduce(1 x ", "all_reduce(2 x "),
    (all_reduce(409600), all_reduce(409598), "all_reduce(409600 x ", "all_reduce(409598 x "),
    (all_reduce(0), all_reduce(1), "all_reduce(0 x ", "all_reduce(1 x "),
    (reduce(12), reduce(13), "reduce(12 x ", "reduce(13 x "),
    (broadcast(12), broadcast(11), "broadcast(12 x ", "broadcast(11 x "),
    (gather(3), gather(70003), "gather(3 x ", "gather(70003 x "),
    (scatter(3), scatter(4), "scatter(3 x ", "scatter(4 x "),
    (all_gather(3), all_gather(4), "all_gather(3 x ", "all_gather(4 x "),
    (reduce_scatter(3), reduce_scatter(4), "reduce_scatter(3 x ", "reduce_scatter(4 x "),
    (gather_lists([3, 4, 5]), gather_lists([3, 5, 4]), "all_gather(", "all_gather("),
    (coalesced(5, 7), coalesced(7, 5), "all_reduce(12 x ", "all_reduce(12 x "),
    (coalesced(5, 7), all_reduce(12), "all_reduce(12 x ", "all_reduce(12 x "),
    # Ops and roots.
    (all_reduce(3, op=MAX), all_reduce(3), "all_reduce(3 x float32, MAX)", "(3 x float32, SUM)"),
    (
        reduce(3, op=AVG),
        reduce(3),
        "reduce(3 x float32, AVG, root 0)",
        "(3 x float32, SUM, root 0)",
    ),
    (reduce_scatter(3, op=MAX), reduce_scatter(3), "(3 x float32, MAX)", "(3 x float32, SUM)"),
    (broadcast(3), broadcast(3, root=1), "(3 x float32, root 0)", "(3 x float32, root 1)"),
    (reduce(3), reduce(3, root=1), "(3 x float32, SUM, root 0)", "(3 x float32, SUM, root 1)"),
    (gather(3), gather(3, root=1), "gather(3 x float32, root 0)", "gather(3 x float32, root 1)"),
    (scatter(3), scatter(3, root=1), "scatter(3 x float32, root 0)", "(3 x float32, root 1)"),
    # Collectives.
    (broadcast(3), all_reduce(3), "broadcast(3 x float32, root 0)", "all_reduce(3 x float32, SUM)"),
    (barrier, all_reduce(3), "barrier()", "all_reduce(3 x float32, SUM)"),
    (reduce(70003), all_reduce(70003), "reduce(70003 x ", "all_reduce(70003 x "),
    (gather(3), all_gather(3), "gather(3 x float32, root 0)", "all_gather(3 x float32)"),
    (scatter(3), broadcast(3), "scatter(3 x ", "broadcast(3 x "),
    (all_gather(3), all_to_all(3), "all_gather(3 x ", "all_to_all("),
    # A rank that names its split sizes expects to compare them, so all ranks have to.
]


# --- on ranks --------------------------------------------------------------------------------------


def call_differently(index: int) -> str:
    rank, n = dist.get_rank(), dist.get_world_size()
    tensors = Tensors(rank, n)
    text = "nothing was raised"
    try:
        DIFFERENT[index][rank == n - 1](tensors)
    except RuntimeError as error:
        text = str(error)
    tensors.expect_untouched()
    after = torch.full((5,), rank + 1.0)
    dist.all_reduce(after)
    assert after.tolist() == [n * (n + 1) / 2] * 5, "the group is of no use any more"
    return text


def call_differently_and_wait_later() -> list[str]:
    """Two operations that differ, between two that agree, all in flight at once."""
    rank = dist.get_rank()
    tensors = [torch.full((numel,), rank + 1.0) for numel in (3, 5 + rank, 70003 + rank, 7)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    texts = []
    for work, tensor in zip(works, tensors, strict=True):
        try:
            work.wait()
            texts.append(str(set(tensor.tolist())))
        except RuntimeError as error:
            texts.append(str(error))
            assert (tensor == rank + 1).all()
    return texts


def move_bytes_as_another_dtype() -> str:
    rank = dist.get_rank()
    tensor = torch.arange(4, dtype=torch.uint8) + 10 * rank
    sent = tensor.view(torch.float8_e8m0fnu) if rank == 0 else tensor
    try:
        dist.broadcast(sent, 0)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def reduce_in_another_order() -> tuple[float, float]:
    rank = dist.get_rank()
    a, b = torch.full((4,), 1.0 * (rank + 1)), torch.full((4,), 100.0 * (rank + 1))
    for tensor in (a, b) if rank == 0 else (b, a):
        dist.all_reduce(tensor)
    return a[0].item(), b[0].item()


def splits_that_do_not_fit() -> list[str]:
    rank, texts = dist.get_rank(), []
    for scale in (1, 40_000):
        received = [torch.full((4 * scale,), -1.0), torch.full((3 * scale,), -1.0)][rank]
        output_splits = [[2, 2], [2, 1]][rank]
        input_splits = [[2, 1], [2, 1]][rank]
        try:
            dist.all_to_all_single(
                received,
                torch.ones(3 * scale),
                [split * scale for split in output_splits],
                [split * scale for split in input_splits],
            )
            texts.append("nothing was raised")
        except RuntimeError as error:
            texts.append(str(error))
        assert (received == -1).all()
    return texts


def legal_splits() -> list[float]:
    rank = dist.get_rank()
    splits = [[1, 2], [2, 1]][rank]
    output = torch.zeros(3)
    dist.all_to_all_single(output, torch.arange(3.0) + 10 * rank, splits, splits)
    return output.tolist()


def splits_on_one_rank(numel: int) -> None:
    """Rank 0 says how it splits, the others split evenly."""
    rank, n = dist.get_rank(), dist.get_world_size()
    splits = [numel] * n if rank == 0 else None
    output = torch.full((n * numel,), -1.0)
    ramp = torch.arange(float(n * numel))
    dist.all_to_all_single(output, ramp + 10_000 * rank, splits, splits)
    mine = ramp[rank * numel : (rank + 1) * numel]
    right = torch.cat([mine + 10_000 * src for src in range(n)])
    assert_same_bits(output, right, "all_to_all_single")


def even_splits_of_other_sizes(numel: int) -> str:
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = numel + (rank == n - 1)
    output = torch.full((n * mine,), -1.0)
    with pytest.raises(RuntimeError, match="does not fit together") as caught:
        dist.all_to_all_single(output, torch.ones(n * mine))
    assert (output == -1).all()
    return str(caught.value)


# Each writes the tensor that it is given, on rank 1 and, but for those with a root there, on rank 0.
WRITING: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "all_reduce_coalesced": lambda y: dist.all_reduce_coalesced([y]),
    "reduce": lambda y: dist.reduce(y, 1),
    "broadcast": lambda y: dist.broadcast(y, 0),
    "all_gather": lambda y: dist.all_gather([y, torch.zeros(4)], torch.zeros(4)),
    "all_gather_into_tensor": lambda y: all_gather_into_tensor(y, torch.zeros(2)),
    "reduce_scatter": lambda y: dist.reduce_scatter(y, [torch.zeros(4)] * 2),
    "reduce_scatter_tensor": lambda y: reduce_scatter_tensor(y, torch.zeros(8)),
    "gather": lambda y: dist.gather(*pair_at(1, torch.zeros(4), [y, torch.zeros(4)]), 1),
    "scatter": lambda y: dist.scatter(*pair_at(1, y, [torch.zeros(4)] * 2), 1),
    "all_to_all": lambda y: dist.all_to_all([y, torch.zeros(4)], [torch.zeros(4)] * 2),
    "all_to_all_single": lambda y: dist.all_to_all_single(y, torch.zeros(4)),
    "recv": lambda y: dist.recv(y, 0) if dist.get_rank() else dist.send(torch.zeros(4), 1),
}


def pair_at(root: int, tensor: Tensor, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor] | None]:
    return tensor, tensors if dist.get_rank() == root else None


def write_what_is_saved_for_backward(name: str) -> str:
    x = torch.full((4,), dist.get_rank() + 1.0, requires_grad=True)
    y = x * 1
    w = y**2
    with torch.no_grad():
        WRITING[name](y)
    try:
        w.sum().backward()
    except RuntimeError as error:
        return str(error)
    assert x.grad is not None
    return str(x.grad.tolist())


def reduce_a_leaf() -> list[list[float]]:
    weight = torch.full((2,), dist.get_rank() + 1.0, requires_grad=True)
    dist.all_reduce(weight)
    first = weight.tolist()
    dist.broadcast(weight, 1)
    parameter = torch.nn.Parameter(torch.full((2,), dist.get_rank() + 1.0))
    dist.broadcast(parameter, 1)
    (weight * parameter).sum().backward()
    assert weight.grad is not None
    return [first, parameter.tolist(), weight.grad.tolist()]


# --- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("index", range(len(DIFFERENT)), ids=lambda i: f"{i}: {DIFFERENT[i][2]}")
def test_calls_that_differ_raise_on_every_rank(pool: Pools, index: int, world_size: int) -> None:
    """Others read floats as integers, mix sum and maximum, abort, or wait out the whole timeout."""
    _, _, one, other = DIFFERENT[index]
    most = "rank 0" if world_size == 2 else "ranks 0, 1"
    for text in pool(world_size).run(call_differently, index):
        assert "of this group differs between ranks" in text
        for subject, side in ((most, one), (f"rank {world_size - 1}", other)):
            (call,) = re.findall(f" {subject} called ([^;]*);", text)
            assert side in call


def test_calls_that_differ_are_reported_by_their_own_works(pool: Pools) -> None:
    """Others let one asynchronous mismatch spoil what was issued before and after it."""
    for first, second, third, fourth in pool(2).run(call_differently_and_wait_later):
        assert (first, fourth) == ("{3.0}", "{3.0}")
        assert "rank 0 called all_reduce(5 x float32" in second
        assert "rank 1 called all_reduce(70004 x float32" in third


def test_bytes_are_not_taken_for_another_dtype(pool: Pools) -> None:
    """Dtypes that are moved as plain bytes are still different dtypes."""
    assert all("differs" in text for text in pool(2).run(move_bytes_as_another_dtype))


def test_equal_calls_in_another_order_meet_in_the_order_of_issue(pool: Pools) -> None:
    """Nothing tells the tensors apart, here as elsewhere; at least nothing else goes wrong."""
    assert pool(2).run(reduce_in_another_order) == [(201.0, 102.0), (102.0, 201.0)]


def test_splits_that_do_not_fit_name_the_pair_of_ranks(pool: Pools) -> None:
    """Others write past the end, or return memory that nobody has written."""
    for small, large in pool(2).run(splits_that_do_not_fit):
        assert "rank 0 sends 1 elements to rank 1, which expects 2" in small
        assert "rank 1 sends" not in small
        assert "rank 0 sends 40000 elements to rank 1, which expects 80000" in large


@pytest.mark.parametrize("numel", [3, 40_009])
def test_splits_may_be_given_on_some_ranks_only(pool: Pools, numel: int) -> None:
    """Others wait for ever, or read their peers' counts as data."""
    for world_size in (2, 3):
        assert pool(world_size).run(splits_on_one_rank, numel) == [None] * world_size


@pytest.mark.parametrize("numel", [3, 40_009])
def test_even_splits_of_other_sizes_are_named(pool: Pools, numel: int) -> None:
    for text in pool(3).run(even_splits_of_other_sizes, numel):
        assert f"rank 0 sends {numel} elements to rank 2, which expects {numel + 1}" in text
        assert f"rank 2 sends {numel + 1} elements to rank 1, which expects {numel}" in text


def test_uneven_splits_worked_out_by_hand(pool: Pools) -> None:
    assert pool(2).run(legal_splits) == [[0.0, 10.0, 11.0], [1.0, 2.0, 12.0]]


@pytest.mark.parametrize("name", WRITING)
def test_autograd_sees_what_collectives_write(pool: Pools, name: str) -> None:
    """Others overwrite a tensor that is saved for backward, and gradients are wrong without a word."""
    texts = pool(2).run(write_what_is_saved_for_backward, name)
    assert "modified by an inplace operation" in texts[1]
    if name in ("reduce", "broadcast", "gather", "recv"):  # here rank 0's tensor is only read
        assert texts[0] == str([2.0] * 4)
    else:
        assert "modified by an inplace operation" in texts[0]


def test_leaves_that_require_gradients_are_allowed(pool: Pools) -> None:
    """Scripts synchronise parameters this way."""
    expected = [[3.0, 3.0], [2.0, 2.0], [2.0, 2.0]]
    assert pool(2).run(reduce_a_leaf) == [expected, expected]
