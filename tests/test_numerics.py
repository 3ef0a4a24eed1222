"""Reductions whose right result is known by hand, and where others go wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from case_data import contribution
from case_runner import all_gather_into_tensor, reduce_op, reduce_scatter_tensor
from checker import assert_same_bits
from torch import Tensor

from pycoll import reference
from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]
NAN, INF = math.nan, math.inf
HALF = torch.float16


# --- on ranks --------------------------------------------------------------------------------------


def all_reduced(rows: list[Tensor], op: str = "sum") -> Tensor:
    tensor = rows[dist.get_rank()].clone()
    dist.all_reduce(tensor, reduce_op(op))
    return tensor


def averages_of_rank_plus_one() -> list[Tensor]:
    rank, n = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((5,), rank + 1.0)
    scattered, listed = torch.zeros(5), torch.zeros(5)
    reduce_scatter_tensor(scattered, tensor.repeat(n), dist.ReduceOp.AVG)
    dist.reduce_scatter(listed, [tensor] * n, dist.ReduceOp.AVG)
    reduced = tensor.clone()
    for root in range(n):  # a rank's tensor is an average once it has been the root
        dist.reduce(reduced if rank == root else tensor.clone(), root, dist.ReduceOp.AVG)
    pair = dist.new_group([1, 2])
    of_pair = tensor.clone()
    if rank in (1, 2):
        dist.all_reduce(of_pair, dist.ReduceOp.AVG, group=pair)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    return [tensor, scattered, listed, reduced, of_pair]


def premultiplied(factors: list[object], values: Tensor) -> list[Tensor]:
    results = []
    for factor in factors:
        results.append(values.clone())
        dist.all_reduce(results[-1], dist._make_nccl_premul_sum(factor))
    return results


def lazy_views() -> list[object]:
    """What collectives make of lazily conjugated and negated tensors; None where they refuse.

    Some functions of torch.distributed refuse conjugated tensors before the backend is asked.
    """
    z = torch.tensor([1 + 2j]) * (dist.get_rank() + 1)
    scattered = torch.zeros(1, dtype=torch.complex64)
    gathered = torch.zeros(2, dtype=torch.complex64)
    conjugated, again, negated = z.clone().conj(), z.clone().conj(), z.clone().conj().imag
    calls = (
        (lambda: dist.all_reduce(conjugated), conjugated),
        (lambda: dist.group.WORLD.allreduce([again]).wait(), again),
        (lambda: dist.all_reduce(negated), negated),
        (lambda: reduce_scatter_tensor(scattered, torch.cat([z, z]).conj()), scattered),
        (lambda: all_gather_into_tensor(gathered, z.conj()), gathered),
    )
    results: list[object] = []
    for call, result in calls:
        try:
            call()
        except (ValueError, RuntimeError):
            results.append(None)
        else:
            results.append(result.tolist())
    return results


def lazy_views_that_are_moved() -> list[list[complex]]:
    """Lazily conjugated tensors as inputs and as outputs, through the functions of the backend.

    Outputs are conjugated views: what is read through them must be what was sent.
    """
    rank = dist.get_rank()
    world = dist.group.WORLD
    z = torch.tensor([1 + 2j, 3 + 4j]) * (rank + 1)

    def lazy() -> Tensor:
        return torch.zeros(2, dtype=torch.complex64).conj()

    sent, reduced, scattered, exchanged = z.clone().conj(), z.clone().conj(), lazy(), lazy()
    gathered, listed = [lazy(), lazy()], [lazy(), lazy()]
    at_root = rank == 0
    broadcast, reduce = dist.BroadcastOptions(), dist.ReduceOptions()
    broadcast.rootRank = reduce.rootRank = 0
    world.broadcast([sent], broadcast).wait()
    world.reduce([reduced], reduce).wait()
    world.allgather([listed], [z.conj()]).wait()
    world.gather([gathered] if at_root else [], [z.conj()], dist.GatherOptions()).wait()
    parts = [[z.conj(), 10 * z.conj()]] if at_root else []
    world.scatter([scattered], parts, dist.ScatterOptions()).wait()
    world.alltoall_base(exchanged, z.conj(), [], []).wait()
    results = [sent, reduced, *listed, scattered, exchanged, *(gathered if at_root else ())]
    return [result.tolist() for result in results]


def complex_product() -> list[Tensor]:
    """Past the functions of torch.distributed, which refuse it."""
    z = torch.tensor([1 + 2j]) * (dist.get_rank() + 1)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.PRODUCT
    dist.group.WORLD.allreduce([z], options).wait()
    return z.tolist()


def moved(inputs: list[Tensor]) -> list[Tensor]:
    mine, n = inputs[dist.get_rank()], dist.get_world_size()
    gathered = torch.zeros(n * mine.numel(), dtype=torch.uint8).view(mine.dtype)
    all_gather_into_tensor(gathered, mine)
    sent = mine.clone()
    dist.broadcast(sent, 1)
    return [gathered, sent]


def extremes_equal_the_reference(dtype: torch.dtype, op: str, numel: int) -> None:
    n = dist.get_world_size()
    rows = [contribution(dtype, op, numel, rank=rank, world_size=n) for rank in range(n)]
    expected = reference.reduce_ranks(rows, op)
    assert_same_bits(all_reduced(rows, op), expected, nan_payload=False)


# --- tests -----------------------------------------------------------------------------------------


def test_averages_divide_by_the_size_of_the_group(pool: Pools) -> None:
    for rank, (*wholes, of_pair) in enumerate(pool(3).run(averages_of_rank_plus_one)):
        assert [whole.tolist() for whole in wholes] == [[2.0] * 5] * 4
        assert of_pair.tolist() == [2.5 if rank else 1.0] * 5


@pytest.mark.parametrize("world_size", [2, 4])
def test_float16_averages_neither_overflow_nor_vanish(pool: Pools, world_size: int) -> None:
    rows = [torch.tensor([40000.0, 2.0**-24], dtype=HALF)] * world_size
    for result in pool(world_size).run(all_reduced, rows, "avg"):
        assert result.tolist() == [40000.0, 2.0**-24]
    for result in pool(world_size).run(all_reduced, rows, "sum"):
        assert result[0].item() == INF


def test_bfloat16_sums_are_rounded_once(pool: Pools) -> None:
    values = [256.0, 1.0, 1.0, 1.0]
    for order in set(itertools.permutations(values)):
        rows = [torch.tensor([value], dtype=torch.bfloat16) for value in order]
        assert [result.item() for result in pool(4).run(all_reduced, rows)] == [260.0] * 4


def test_float32_sums_follow_rank_order(pool: Pools) -> None:
    for order in set(itertools.permutations([1e8, 1.0, -1e8, 1.0])):
        rows = [torch.tensor([value]) for value in order]
        expected = reference.reduce_ranks(rows).item()
        assert [result.item() for result in pool(4).run(all_reduced, rows)] == [expected] * 4


@pytest.mark.parametrize("numel", [3, 17, 65537])
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, HALF, torch.bfloat16])
def test_nan_wins_whichever_rank_holds_it(
    pool: Pools, dtype: torch.dtype, op: str, numel: int
) -> None:
    for holder in range(3):
        rows = [torch.tensor([1.0 + rank, -INF, INF], dtype=dtype) for rank in range(3)]
        rows[holder][:] = NAN
        for result in pool(3).run(all_reduced, rows, op):
            assert result.isnan().all()
    pool(3).run(extremes_equal_the_reference, dtype, op, numel)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        *[(op, [1, 1, 1, 0]) for op in ("sum", "max", "bor")],
        *[(op, [1, 0, 0, 0]) for op in ("product", "min", "band")],
        ("bxor", [0, 1, 1, 0]),
    ],
)
@pytest.mark.parametrize("true", [1, 2, 255])
def test_bool_whatever_byte_is_true(pool: Pools, op: str, expected: list[int], true: int) -> None:
    first = torch.tensor([true, 0, true, 0], dtype=torch.uint8).view(torch.bool)
    second = torch.tensor([1, 1, 0, 0], dtype=torch.uint8).view(torch.bool)
    for result in pool(2).run(all_reduced, [first, second], op):
        assert result.view(torch.uint8).tolist() == expected


def test_lazy_conjugation_and_negation_are_carried_out_or_refused(pool: Pools) -> None:
    expected = [[3 - 6j], [3 - 6j], [-6.0], [3 - 6j], [1 - 2j, 2 - 4j]]
    for results in pool(2).run(lazy_views):
        for result, right in zip(results, expected, strict=True):
            assert result in (None, right)
        assert results[2] is not None, "a negated view is an ordinary float tensor to its user"


def test_lazily_conjugated_tensors_are_moved_as_they_read(pool: Pools) -> None:
    zero, one = [1 - 2j, 3 - 4j], [2 - 4j, 6 - 8j]
    total = [3 - 6j, 9 - 12j]
    at_root, elsewhere = pool(2).run(lazy_views_that_are_moved)
    assert at_root == [zero, total, zero, one, zero, [1 - 2j, 2 - 4j], zero, one]
    scattered = [10 - 20j, 30 - 40j]
    assert elsewhere == [zero, one, zero, one, scattered, [3 - 4j, 6 - 8j]]


def test_complex_products_are_products_of_complex_numbers(pool: Pools) -> None:
    assert pool(2).run(complex_product) == [[-6 + 8j]] * 2


@pytest.mark.parametrize("dtype", reference.FLOAT8_DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_float8_moves_bit_for_bit_and_is_reduced_by_value(pool: Pools, dtype: torch.dtype) -> None:
    inputs = [torch.tensor([rank + 1.0, -0.0, NAN]).to(dtype) for rank in range(2)]
    for gathered, sent in pool(2).run(moved, inputs):
        assert_same_bits(gathered, torch.cat(inputs))
        assert_same_bits(sent, inputs[1])
    for result in pool(2).run(all_reduced, inputs):
        assert result.to(torch.float32)[0].item() == 3.0
        assert result.to(torch.float32)[2].isnan()


def test_bitwise_ops_are_not_sums_in_disguise(pool: Pools) -> None:
    rows = [torch.tensor([6], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)]
    for op, expected in (("band", 2), ("bor", 7), ("bxor", 5)):
        assert [result.item() for result in pool(2).run(all_reduced, rows, op)] == [expected] * 2


def test_premul_sum_takes_its_factor_in_every_form(pool: Pools) -> None:
    factors = [0.5, torch.tensor(0.5), torch.tensor([0.5])]
    for results in pool(2).run(premultiplied, factors, torch.tensor([3.0])):
        assert [result.tolist() for result in results] == [[3.0]] * 3
    for results in pool(2).run(premultiplied, [0.5], torch.tensor([40000.0], dtype=HALF)):
        assert results[0].tolist() == [40000.0]
