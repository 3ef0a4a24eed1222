"""Dtypes and reduction ops that went wrong for others.

`test_numerics` holds averages, precision, booleans, complex numbers and float8 through all_reduce;
`test_bracketing` holds equal bits; `test_arguments` ops without meaning. Here is what these leave:
every dtype that torch has, reductions with a root, factors that differ, and values repeated often.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from case_data import hashed
from case_runner import all_gather_into_tensor, reduce_op, reduce_scatter_tensor
from checker import assert_same_bits
from torch import Tensor, nn

from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]

ALL_DTYPES = tuple(
    dict.fromkeys(value for value in vars(torch).values() if isinstance(value, torch.dtype))
)
QUANTISED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
MOVED = [dtype for dtype in ALL_DTYPES if dtype not in QUANTISED]


# --- on ranks --------------------------------------------------------------------------------------


def raw(dtype: torch.dtype, rank: int, salt: int = 0) -> Tensor:
    """Bytes of every kind, as a vector of 60 (or, of wider dtypes, fewer) elements of `dtype`.

    Past the constructors, because torch computes nothing in some of these dtypes.
    """
    nbytes = 60 * dtype.itemsize if dtype.itemsize < 16 else 960
    return (hashed(nbytes, rank, salt) % 256).to(torch.uint8).view(dtype)


def assert_same_bytes(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.dtype == expected.dtype
    assert_same_bits(actual.view(torch.uint8), expected.view(torch.uint8), what)


def move_every_way(dtype: torch.dtype) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    rows, last = [raw(dtype, r) for r in range(n)], n - 1
    whole = torch.cat([row.view(torch.uint8) for row in rows]).view(dtype)

    def blank(like: Tensor | None = None) -> Tensor:
        nbytes = (rows[0] if like is None else like).view(torch.uint8).numel()
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8).view(dtype)

    sent = raw(dtype, rank)
    dist.broadcast(sent, last)
    assert_same_bytes(sent, rows[last], "broadcast")
    outputs = [blank() for _ in range(n)]
    dist.all_gather(outputs, rows[rank])
    gathered = [blank() for _ in range(n)] if rank == last else None
    dist.gather(rows[rank], gathered, last)
    for source, row in enumerate(rows):
        assert_same_bytes(outputs[source], row, "all_gather")
        if gathered:
            assert_same_bytes(gathered[source], row, "gather")
    output = blank(whole)
    all_gather_into_tensor(output, rows[rank])
    assert_same_bytes(output, whole, "all_gather_into_tensor")
    part = blank()
    dist.scatter(part, [raw(dtype, r, salt=1) for r in range(n)] if rank == last else None, last)
    assert_same_bytes(part, raw(dtype, rank, salt=1), "scatter")
    chunk = rows[0].numel() // n
    received = torch.cat([row.view(torch.uint8).chunk(n)[rank] for row in rows]).view(dtype)
    exchanged = blank()
    dist.all_to_all_single(exchanged, rows[rank])
    assert_same_bytes(exchanged, received, "all_to_all_single")
    exchanged = blank()
    inputs = [rows[rank][r * chunk : (r + 1) * chunk] for r in range(n)]
    dist.all_to_all([exchanged[r * chunk : (r + 1) * chunk] for r in range(n)], inputs)
    assert_same_bytes(exchanged, received, "all_to_all")
    part = blank()
    works = [dist.isend(rows[rank], (rank + 1) % n), dist.irecv(part, (rank - 1) % n)]
    for work in works:
        assert work is not None
        work.wait()
    assert_same_bytes(part, rows[rank - 1], "recv")


def move_quantised(dtype: torch.dtype) -> list[str]:
    """What is said of it by torch's dispatcher, and by the backend if it is asked directly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to drop these dtypes
        tensor = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, dtype)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    texts = []
    for call in (
        lambda: dist.broadcast(tensor, 0),
        lambda: backend.broadcast([tensor], dist.BroadcastOptions()),
        lambda: backend.allgather([[tensor, tensor]], [tensor]),
    ):
        try:
            call()
            texts.append("nothing was raised")
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
    return texts


def reduce_by_hand() -> list[object]:
    """Results at rank 1 of reduce, and of reduce_scatter on all, of values known by hand."""
    rank, n = dist.get_rank(), dist.get_world_size()
    z = torch.tensor([1 + 2j, 0 - 1j]) * (rank + 1)
    results: list[object] = []
    for dtype in (torch.complex64, torch.complex128):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
            reduced = z.to(dtype, copy=True)
            dist.reduce(reduced, 1, op)
            results.append(reduced.tolist())
    truth = torch.tensor([[True, False, True, False], [True, True, False, False]][rank])
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.BXOR):
        reduced = truth.clone()
        dist.reduce(reduced, 1, op)
        results.append(reduced.view(torch.uint8).tolist())
    part = torch.zeros(2, dtype=torch.bool)
    reduce_scatter_tensor(part, truth)
    results.append(part.view(torch.uint8).tolist())
    halves = torch.full((n,), 40000.0, dtype=torch.half)
    half = torch.zeros(1, dtype=torch.half)
    reduce_scatter_tensor(half, halves, dist.ReduceOp.AVG)
    results.append(half.tolist())
    return results


def reduce_twice() -> list[list[float]]:
    tensor = torch.tensor([1.0, 10.0]) * (dist.get_rank() + 1)
    results = []
    for _ in range(2):
        dist.reduce(tensor, 0)
        results.append(tensor.tolist())
    return results


def sum_true_until_bytes_would_wrap() -> list[list[int]]:
    """Nine times on two ranks: a sum of bytes would be 512, and its low byte 0 after the eighth."""
    tensor = torch.ones(300, dtype=torch.bool)
    for _ in range(9):
        dist.all_reduce(tensor)
    return tensor.view(torch.uint8).unique().tolist()


def premultiplied_by_own_factors(dtype: torch.dtype) -> list[Tensor]:
    """Rank r has the factor -r - 0.5, and 16, 32 or 48 everywhere."""
    rank, n = dist.get_rank(), dist.get_world_size()
    op = reduce_op("premul_sum", -rank - 0.5)
    tensor = torch.full((n * 5,), 16.0 * (rank + 1)).to(dtype)
    part, listed, reduced = tensor[:5].clone(), tensor[:5].clone(), tensor.clone()
    reduce_scatter_tensor(part, tensor, op)
    dist.reduce_scatter(listed, list(tensor.chunk(n)), op)
    dist.reduce(reduced, n - 1, op)
    dist.all_reduce(tensor, op)
    results = [part, listed, tensor, *([reduced] if rank == n - 1 else [])]
    return [result.to(torch.complex64) for result in results]


def train_float16() -> list[float]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False).half())
    model(torch.ones(1, 1, dtype=torch.half)).backward(torch.full((1, 1), 40000.0).half())
    return model.module.weight.grad.flatten().tolist()


# --- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_every_dtype_is_moved_bit_for_bit(pool: Pools, dtype: torch.dtype) -> None:
    """Others refuse to gather float8 and small integers, although moving needs no arithmetic."""
    assert pool(3).run(move_every_way, dtype) == [None] * 3


@pytest.mark.parametrize("dtype", QUANTISED[:3], ids=str)
def test_quantised_tensors_are_refused(pool: Pools, dtype: torch.dtype) -> None:
    """Their bytes alone would lose scale and zero point without a word."""
    for through_torch, *of_pycoll in pool(2).run(move_quantised, dtype):
        assert "Quantized" in through_torch
        assert all("is quantised (" in text and "int_repr()" in text for text in of_pycoll)


def test_reductions_with_a_root_worked_out_by_hand(pool: Pools) -> None:
    """Others multiply complex numbers part by part, and add booleans as bytes."""
    total, mean, product = [3 + 6j, -3j], [1.5 + 3j, -1.5j], [-6 + 8j, -2 + 0j]
    results = pool(2).run(reduce_by_hand)
    assert results[1][:6] == [total, mean, product] * 2
    assert results[1][6:9] == [[1, 1, 1, 0], [1, 0, 0, 0], [0, 1, 1, 0]]
    assert results[0][:6] == [[1 + 2j, -1j]] * 6
    assert [result[9] for result in results] == [[1, 1], [1, 0]]
    assert [result[10] for result in results] == [[40000.0]] * 2


def test_reduce_leaves_the_tensors_of_other_ranks_alone(pool: Pools) -> None:
    """Others leave partial sums there, so that the second reduce of a tensor adds them again."""
    zero, one, two = pool(3).run(reduce_twice)
    assert zero == [[6.0, 60.0], [11.0, 110.0]]
    assert (one, two) == ([[2.0, 20.0]] * 2, [[3.0, 30.0]] * 2)


def test_sums_of_true_do_not_wrap(pool: Pools) -> None:
    """Others add booleans as bytes: 256 times true is false."""
    assert pool(2).run(sum_true_until_bytes_would_wrap) == [[1], [1]]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.half, torch.bfloat16, torch.complex64], ids=str
)
def test_every_rank_multiplies_by_its_own_factor(pool: Pools, dtype: torch.dtype) -> None:
    """Others do not know PREMUL_SUM, sum without factors, or use one rank's factor for all."""
    expected = -0.5 * 16 - 1.5 * 32 - 2.5 * 48
    for results in pool(3).run(premultiplied_by_own_factors, dtype):
        for result in results:
            assert set(result.tolist()) == {expected}


def test_ddp_averages_large_float16_gradients(pool: Pools) -> None:
    """Others sum first: 40000 + 40000 is infinite in float16, although the average is 40000."""
    assert pool(2).run(train_float16) == [[40000.0]] * 2
