"""Shapes and memory layouts that went wrong for others.

The matrix of `test_collectives` crosses layouts and sizes with every collective, guard bytes around
each tensor; `test_arguments` holds sizes that do not fit, outputs that overlap and tensors without
elements. Here are views of a larger tensor whose other elements are looked at, sizes around the number
of ranks for every algorithm, and sizes that do not fit into 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from case_runner import all_gather_into_tensor, group_options, reduce_scatter_tensor
from checker import assert_same_bits
from torch import Tensor

from pycoll.testing import RankPool, check_guards, guarded

Pools = Callable[[int], RankPool]
View = Callable[[], Tensor]

# Each makes a view of a larger tensor.
VIEWS: dict[str, View] = {
    "a column": lambda: torch.empty(7, 3)[:, 1],
    "a block of a matrix": lambda: torch.empty(10, 11)[2:7, 3:8],
    "a row of a transposed matrix": lambda: torch.empty(5, 4).t()[2],
    "every third element": lambda: torch.empty(50)[2::3],
    "a diagonal": lambda: torch.empty(9, 9).diagonal(1),
    "channels last": lambda: torch.empty(2, 3, 4, 5, dtype=torch.half).to(
        memory_format=torch.channels_last
    ),
    "permuted, with gaps": lambda: torch.empty(7, 6, 5)[::2, 1:4].permute(2, 0, 1),
    "a dim of one with a stride of its own": lambda: torch.empty(40).as_strided((1, 7), (1000, 3)),
    "real parts": lambda: torch.empty(6, dtype=torch.complex64).real,
    "one element": lambda: torch.empty(4, 4)[2, 3],
    "the middle of a long vector": lambda: torch.empty(300_007)[3:-1],
}


# --- on ranks --------------------------------------------------------------------------------------


def content(shape: torch.Size, dtype: torch.dtype, rank: int, salt: int = 0) -> Tensor:
    """Small whole numbers that depend on position and rank."""
    numel = shape.numel()
    return ((torch.arange(numel) * 7 + rank * 13 + salt * 29) % 251).to(dtype).reshape(shape)


class Framed:
    """A view filled with given values; the rest of the tensor under it must not change."""

    REST = -7.0

    def __init__(self, view: View, values: Tensor | None = None) -> None:
        self.tensor = view()
        whole = torch.empty(0, dtype=self.tensor.dtype).set_(self.tensor.untyped_storage())
        self.whole = whole.fill_(self.REST)
        if values is not None:
            self.tensor.copy_(values)

    def expect(self, values: Tensor, what: str) -> None:
        assert_same_bits(self.tensor, values, what)
        self.tensor.fill_(self.REST)
        assert (self.whole == self.REST).all(), f"{what}: neighbours were written"


def every_collective_on_a_view(name: str) -> None:
    rank, n, view = dist.get_rank(), dist.get_world_size(), VIEWS[name]
    shape, dtype = view().shape, view().dtype
    rows = [content(shape, dtype, r) for r in range(n)]
    total = torch.stack(rows).sum(0).to(dtype)
    last = n - 1

    def mine() -> Framed:
        return Framed(view, rows[rank])

    for reduce, expected in (
        (dist.all_reduce, total),
        (lambda x: dist.reduce(x, last), total if rank == last else rows[rank]),
        (lambda x: dist.broadcast(x, last), rows[last]),
    ):
        framed = mine()
        reduce(framed.tensor)
        framed.expect(expected, "in place")

    outputs = [Framed(view) for _ in range(n)]
    dist.all_gather([output.tensor for output in outputs], mine().tensor)
    for output, row in zip(outputs, rows, strict=True):
        output.expect(row, "all_gather")
    here = rank == last
    outputs = [Framed(view) for _ in range(n if here else 0)]
    dist.gather(mine().tensor, [output.tensor for output in outputs] if here else None, last)
    for output, row in zip(outputs, rows if here else (), strict=True):
        output.expect(row, "gather")
    scattered = [content(shape, dtype, r, salt=1) for r in range(n)]
    output = Framed(view)
    sent = [Framed(view, part).tensor for part in scattered] if here else None
    dist.scatter(output.tensor, sent, last)
    output.expect(scattered[rank], "scatter")
    inputs = [Framed(view, content(shape, dtype, rank, salt=dst)) for dst in range(n)]
    output = Framed(view)
    dist.reduce_scatter(output.tensor, [part.tensor for part in inputs])
    parts = [content(shape, dtype, src, salt=rank) for src in range(n)]
    output.expect(torch.stack(parts).sum(0).to(dtype), "reduce_scatter")
    outputs = [Framed(view) for _ in range(n)]
    dist.all_to_all([part.tensor for part in outputs], [part.tensor for part in inputs])
    for part, expected in zip(outputs, parts, strict=True):
        part.expect(expected, "all_to_all")
    exchange_with_neighbours(view, rows)


def exchange_with_neighbours(view: View, rows: list[Tensor]) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    received = Framed(view)
    works = [
        dist.isend(Framed(view, rows[rank]).tensor, (rank + 1) % n),
        dist.irecv(received.tensor, (rank - 1) % n),
    ]
    for work in works:
        assert work is not None
        work.wait()
    received.expect(rows[(rank - 1) % n], "recv")


def columns_by_hand() -> list[list[float]]:
    """The columns and tensors of a user who saw wrong sums, on two ranks."""
    rank = dist.get_rank()
    results = []
    for call in (
        lambda base: dist.all_reduce(base[:, 1]),
        lambda base: dist.reduce(base[:, 1], dst=0),
    ):
        base = torch.arange(6.0).reshape(3, 2)
        base[:, 1] *= rank + 1
        call(base)
        results.append(base.flatten().tolist())
    base = torch.arange(6.0).reshape(3, 2) * (10 if rank else 1)
    dist.broadcast(base[:, 1], src=0)
    results.append(base.flatten().tolist())
    out = torch.zeros(3)
    dist.scatter(out, [torch.linspace(0, 5, 6)[::2]] * 2 if rank == 0 else None, src=0)
    results.append(out.tolist())
    base = torch.zeros(3, 2)
    parts = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])]
    dist.scatter(base[:, 0], parts if rank == 0 else None, src=0)
    results.append(base.flatten().tolist())
    return results


def sizes_around(n: int) -> list[int]:
    return [1, 2, 3, n - 1, n, n + 1, 2 * n - 1, 17, 1023, 1025, 65537]


def reduce_sizes_around(numels: list[int], dtypes: list[torch.dtype], algorithm: str) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(pg_options=group_options(algorithm))
    for dtype in dtypes:
        period = 11 if dtype in (torch.int8, torch.bfloat16) else 251  # exact, even summed
        for numel in numels:
            ramp = torch.arange(numel) % period
            for op, scale in ((dist.ReduceOp.SUM, n * (n + 1) // 2), (dist.ReduceOp.MAX, n)):
                tensor = guarded((ramp * (rank + 1)).to(dtype), offset_bytes=dtype.itemsize)
                dist.all_reduce(tensor, op, group=group)
                assert_same_bits(tensor, (ramp * scale).to(dtype), f"{numel} x {dtype}")
                check_guards(tensor)
    dist.destroy_process_group(group)


def overlapping_input_and_output(collective: str, numel: int, offset: int) -> str:
    """An output that begins `offset` elements after its legal place in the input, or the reverse."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = [content(torch.Size([numel]), torch.float32, r) for r in range(n)]
    buffer = torch.cat([*chunks, torch.zeros(offset)])
    whole, shifted = buffer[: n * numel], buffer[offset + rank * numel :][:numel]
    parts = list(whole.view(n, numel).unbind())
    if collective in ("all_gather", "all_gather_into_tensor", "gather"):
        whole.zero_()
        shifted.copy_(chunks[rank])
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather(parts, shifted),
        "all_gather_into_tensor": lambda: all_gather_into_tensor(whole, shifted),
        "gather": lambda: dist.gather(shifted, parts if rank == 0 else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(shifted, parts),
        "reduce_scatter_tensor": lambda: reduce_scatter_tensor(shifted, whole),
        "scatter": lambda: dist.scatter(shifted, parts if rank == 0 else None, 0),
    }
    try:
        calls[collective]()
    except (ValueError, RuntimeError) as error:
        return "refused" if re.search("overlap|shares? memory", str(error)) else str(error)
    if collective == "gather" and rank > 0:
        return "right"
    if collective.endswith("gather") or collective == "all_gather_into_tensor":
        right = torch.equal(whole, torch.cat(chunks))
    else:
        right = torch.equal(shifted, chunks[rank] * (1 if collective == "scatter" else n))
    return "right" if right else "wrong"


HUGE = 2**31 + 10
PLACES = (0, 2**31 - 1, 2**31, HUGE - 1)


def marked(value: int) -> Tensor:
    """More than 2**31 zeros but for `value` at both sides of that place and at both ends."""
    tensor = torch.zeros(HUGE, dtype=torch.uint8)
    tensor[list(PLACES)] = value
    return tensor


def expect_marked(tensor: Tensor, value: int) -> None:
    assert tensor[list(PLACES)].tolist() == [value] * len(PLACES)
    tensor[list(PLACES)] = 0
    assert not tensor.any()


def huge_tensors() -> None:
    rank = dist.get_rank()
    tensor = marked(rank + 1)
    dist.all_reduce(tensor)
    expect_marked(tensor, 3)
    tensor = marked(rank + 4)
    dist.broadcast(tensor, 1)
    expect_marked(tensor, 5)
    tensor = marked(7 if rank == 0 else 0)
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    expect_marked(tensor, 7)
    half = HUGE // 2
    part = marked(9)[half * rank :][:half].clone()
    all_gather_into_tensor(tensor, part)
    expect_marked(tensor, 9)
    reduce_scatter_tensor(part, marked(rank + 1))
    assert_same_bits(part, marked(3)[half * rank :][:half], "reduce_scatter")


# --- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_views_are_used_where_they_lie(pool: Pools, world_size: int, name: str) -> None:
    """Others walk from the data pointer, strides or not: wrong results, and neighbours overwritten."""
    assert pool(world_size).run(every_collective_on_a_view, name) == [None] * world_size


def test_columns_worked_out_by_hand(pool: Pools) -> None:
    """Others answer 3, 9, 5 where the sum of the columns is 3, 9, 15, and change the other column."""
    zero, one = pool(2).run(columns_by_hand)
    assert zero[0] == one[0] == [0.0, 3.0, 2.0, 9.0, 4.0, 15.0]
    assert zero[1] == [0.0, 3.0, 2.0, 9.0, 4.0, 15.0]
    assert one[1] == [0.0, 2.0, 2.0, 6.0, 4.0, 10.0]
    assert zero[2] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert one[2] == [0.0, 1.0, 20.0, 3.0, 40.0, 5.0]
    assert zero[3] == one[3] == [0.0, 2.0, 4.0]
    assert zero[4] == [1.0, 0.0, 2.0, 0.0, 3.0, 0.0]
    assert one[4] == [4.0, 0.0, 5.0, 0.0, 6.0, 0.0]


@pytest.mark.parametrize("algorithm", ["auto", "one_shot", "two_shot", "ring"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_no_tail_is_dropped(pool: Pools, world_size: int, algorithm: str) -> None:
    """Others cut into equal chunks and lose the rest, or crash on a chunk without elements."""
    dtypes = [torch.int8, torch.bfloat16, torch.float32, torch.float64]
    arguments = (sizes_around(world_size), dtypes, algorithm)
    assert pool(world_size).run(reduce_sizes_around, *arguments) == [None] * world_size


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_no_tail_of_a_long_tensor_is_dropped(pool: Pools, world_size: int, algorithm: str) -> None:
    """A size at which others stop at an assertion about sizes."""
    arguments = ([10_556_587], [torch.bfloat16, torch.float32], algorithm)
    results = pool(world_size).run(reduce_sizes_around, *arguments, timeout=240)
    assert results == [None] * world_size


@pytest.mark.parametrize(
    "collective",
    [
        *("all_gather", "all_gather_into_tensor", "gather"),
        *("reduce_scatter", "reduce_scatter_tensor", "scatter"),
    ],
)
def test_an_output_that_overlaps_an_input_is_right_or_refused(pool: Pools, collective: str) -> None:
    """Others, and memory, cannot tell which of the two was meant; an overwritten input is no answer."""
    for numel, offset in ((5, 1), (3000, 7), (30_000, 13), (300_000, 70_000)):
        outcomes = pool(3).run(overlapping_input_and_output, collective, numel, offset)
        assert outcomes in (["right"] * 3, ["refused"] * 3), (numel, offset, outcomes)


def available_gib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    return kib / 2**20


@pytest.fixture
def own_pool() -> Iterator[RankPool]:
    """Ranks of its own, so that their memory goes with them."""
    with RankPool(2, timeout=600) as ranks:
        yield ranks


@pytest.mark.full
@pytest.mark.slow
def test_more_than_two_gib(own_pool: RankPool) -> None:
    """Others keep sizes in 32 bits: they hang, or access memory that is not theirs."""
    if available_gib() < 12:
        pytest.skip(f"needs 12 GiB of memory; {available_gib():.1f} GiB are free")
    assert own_pool.run(huge_tensors) == [None, None]
