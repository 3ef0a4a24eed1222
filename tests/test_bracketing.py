"""The order of additions is fixed: the same bits whatever an element's neighbours are.

All data here is inexact (see `case_data`), so any other order of additions, and any rounding of a
partial sum, shows in the bits. That goes for sizes that cross every threshold between algorithms.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from case_data import contribution
from case_runner import BACKEND, group_options, reduce_op, reduce_scatter_tensor
from checker import assert_same_bits, complement, joined
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pycoll import reference
from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]

pytestmark = pytest.mark.skipif(BACKEND != "pycoll", reason="a promise of pycoll only")

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
NUMEL = 70001  # prime, and above the segment of every algorithm for most of DTYPES
CUTS = (1, 8, 71, 64, 1009, 4096, 20011)


def data_of_all(dtype: torch.dtype, op: str, numel: int) -> list[Tensor]:
    n = dist.get_world_size()
    return [contribution(dtype, op, numel, rank=rank, world_size=n, salt=5) for rank in range(n)]


def reduced(tensor: Tensor, op: str, group: object = None) -> Tensor:
    dist.all_reduce(tensor, reduce_op(op), group=group)
    return tensor


# --- on ranks --------------------------------------------------------------------------------------


def reduce_whole_and_in_pieces(dtype: torch.dtype, op: str, cuts: Sequence[int]) -> None:
    rows = data_of_all(dtype, op, NUMEL)
    mine = rows[dist.get_rank()]
    expected = reference.reduce_ranks(rows, op)
    assert_same_bits(reduced(mine.clone(), op), expected, "whole")
    pieces = torch.split(mine.clone(), [*cuts, NUMEL - sum(cuts)])
    assert_same_bits(joined([reduced(piece, op) for piece in pieces]), expected, "in pieces")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has deprecated it
        dist.all_reduce_coalesced(
            pieces := [piece.clone() for piece in mine.split(10007)], reduce_op(op)
        )
    assert_same_bits(joined(pieces), expected, "coalesced")


def reduce_inside_larger_buffers(dtype: torch.dtype, op: str) -> None:
    rows = data_of_all(dtype, op, 1009)
    mine = rows[dist.get_rank()]
    expected = reference.reduce_ranks(rows, op)
    around = data_of_all(dtype, op, 1 << 19)[dist.get_rank()]
    for before, after in ((0, 7), (1, 0), (3, 100), (5, 5000), (64, 30011), (9973, 300007)):
        buffer = torch.cat([around[:before], mine, around[-1 - after : -1]])
        reduced(buffer, op)
        assert_same_bits(buffer[before : before + 1009], expected, f"after {before} elements")


def reduce_one_row_in_batches(dtype: torch.dtype, op: str) -> None:
    """The same row alone, and as the first of 64 and of 4096 rows."""
    rows = data_of_all(dtype, op, 257)
    expected = reference.reduce_ranks(rows, op)
    for batch in (1, 2, 64, 4096):
        result = reduced(rows[dist.get_rank()].repeat(batch, 1), op)
        for index in {0, batch // 2, batch - 1}:
            assert_same_bits(result[index], expected, f"row {index} of {batch}")


def reduce_scatter_as_all_reduce(dtype: torch.dtype, op: str) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = data_of_all(dtype, op, 5003 * n)
    expected = reference.reduce_ranks(rows, op)[5003 * rank : 5003 * (rank + 1)]
    tensor, listed = complement(expected), complement(expected)
    reduce_scatter_tensor(tensor, rows[rank], reduce_op(op))
    assert_same_bits(tensor, expected, "tensor form")
    dist.reduce_scatter(listed, list(rows[rank].split(5003)), reduce_op(op))
    assert_same_bits(listed, expected, "list form")


def reduce_by_every_algorithm_that_keeps_the_order(dtype: torch.dtype, op: str) -> None:
    for algorithm in ("one_shot", "two_shot", "direct", "auto"):
        group = dist.new_group(pg_options=group_options(algorithm))
        for numel in (1, 1009, NUMEL):
            rows = data_of_all(dtype, op, numel)
            result = reduced(rows[dist.get_rank()], op, group)
            assert_same_bits(result, reference.reduce_ranks(data_of_all(dtype, op, numel), op))
        dist.destroy_process_group(group)


def reduce_many_times(dtype: torch.dtype) -> list[Tensor]:
    rows = data_of_all(dtype, "sum", NUMEL)
    return [reduced(rows[dist.get_rank()].clone(), "sum") for _ in range(5)]


# --- tests -----------------------------------------------------------------------------------------

on_all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
on_all_sizes = pytest.mark.parametrize(
    "world_size",
    [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)],
)
ON_RANKS = (
    reduce_inside_larger_buffers,
    reduce_one_row_in_batches,
    reduce_scatter_as_all_reduce,
    reduce_by_every_algorithm_that_keeps_the_order,
)


@pytest.mark.parametrize("op", ["sum", "avg"])
@on_all_sizes
@on_all_dtypes
def test_pieces_have_the_bits_of_the_whole(
    pool: Pools, dtype: torch.dtype, world_size: int, op: str
) -> None:
    results = pool(world_size).run(reduce_whole_and_in_pieces, dtype, op, CUTS)
    assert results == [None] * world_size


@pytest.mark.parametrize("fn", ON_RANKS, ids=lambda fn: fn.__name__)
@on_all_sizes
@on_all_dtypes
def test_surroundings_and_form_do_not_change_bits(
    pool: Pools, dtype: torch.dtype, world_size: int, fn: Callable[..., None]
) -> None:
    assert pool(world_size).run(fn, dtype, "sum") == [None] * world_size


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cuts=st.lists(st.integers(0, 9000), max_size=7), dtype=st.sampled_from(DTYPES))
def test_any_cut_has_the_bits_of_the_whole(
    pool: Pools, cuts: list[int], dtype: torch.dtype
) -> None:
    assert pool(3).run(reduce_whole_and_in_pieces, dtype, "sum", tuple(cuts)) == [None] * 3


@on_all_dtypes
def test_all_ranks_and_all_runs_have_the_same_bits(pool: Pools, dtype: torch.dtype) -> None:
    results = [tensor for tensors in pool(4).run(reduce_many_times, dtype) for tensor in tensors]
    assert len(results) == 20
    for result in results[1:]:
        assert_same_bits(result, results[0])
