"""Many operations in flight, one after the other, and on the same tensors."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_runner import all_gather_into_tensor, reduce_scatter_tensor
from checker import assert_same_bits, complement
from torch import Tensor

from pycoll.testing import RankPool, report_progress

Pools = Callable[[int], RankPool]

NUMELS = (1, 4096, 7, 65537, 0, 33)
LARGE_NUMEL, EVERY = 1048577, 100  # a large one now and then
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.int8)


def ramp(numel: int, step: int, dtype: torch.dtype) -> Tensor:
    """Small integers that depend on the position and on the step; exact in every dtype, even summed."""
    return ((torch.arange(numel) + step) % 11).to(dtype)


# --- on ranks --------------------------------------------------------------------------------------


def reduce_one_tensor_twice(numel: int) -> Tensor:
    tensor = torch.full((numel,), dist.get_rank() + 1.0)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(2)]
    for work in works:
        work.wait()
    return tensor.unique()


def wait_in_reverse(numel: int) -> list[Tensor]:
    tensors = [torch.full((numel,), scale * (dist.get_rank() + 1.0)) for scale in (1, 10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return [tensor.unique() for tensor in tensors]


def wait_in_random_order(num_operations: int) -> list[int]:
    """The numbers of the operations whose result was wrong."""
    rank, n = dist.get_rank(), dist.get_world_size()
    numels = [NUMELS[i % len(NUMELS)] for i in range(num_operations)]
    tensors = [ramp(numel, i, torch.float32) * (rank + 1) for i, numel in enumerate(numels)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    order = list(range(num_operations))
    random.Random(rank).shuffle(order)
    for i in order:
        works[i].wait()
    scale = n * (n + 1) // 2
    return [
        i
        for i, tensor in enumerate(tensors)
        if not torch.equal(tensor, ramp(numels[i], i, torch.float32) * scale)
    ]


def change_size_dtype_and_collective(num_operations: int, num_groups: int) -> None:
    """No barrier between operations, and ranks that dawdle at different times."""
    rank, n = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(num_groups)]
    common, own = random.Random(7), random.Random(100 + rank)
    for step in range(num_operations):
        report_progress(f"operation {step}")
        numel = NUMELS[step % len(NUMELS)] if step % EVERY else LARGE_NUMEL
        dtype = DTYPES[common.randrange(len(DTYPES))]
        collective = common.choice(COLLECTIVES)
        if own.random() < 0.03:
            time.sleep(own.random() * 0.005)
        values = ramp(numel, step, dtype)
        collective(values, rank, n, groups[step % num_groups])
    for group in groups:
        dist.destroy_process_group(group)


def check_all_reduce(values: Tensor, rank: int, n: int, group: Any) -> None:
    tensor = values * (rank + 1)
    dist.all_reduce(tensor, group=group)
    assert_same_bits(tensor, values * (n * (n + 1) // 2), "all_reduce")


def check_all_gather(values: Tensor, rank: int, n: int, group: Any) -> None:
    expected = torch.cat([values + source for source in range(n)])
    output = complement(expected)
    all_gather_into_tensor(output, values + rank, group=group)
    assert_same_bits(output, expected, "all_gather")


def check_reduce_scatter(values: Tensor, rank: int, n: int, group: Any) -> None:
    whole = torch.cat([values + chunk for chunk in range(n)])
    expected = values * n + rank * n
    output = complement(expected)
    reduce_scatter_tensor(output, whole, group=group)
    assert_same_bits(output, expected, "reduce_scatter")


def check_broadcast(values: Tensor, rank: int, n: int, group: Any) -> None:
    src = values.numel() % n
    tensor = values.clone() if rank == src else complement(values)
    dist.broadcast(tensor, src, group=group)
    assert_same_bits(tensor, values, "broadcast")


def check_reduce(values: Tensor, rank: int, n: int, group: Any) -> None:
    dst = values.numel() % n
    tensor = values * (rank + 1)
    dist.reduce(tensor, dst, group=group)
    scale = n * (n + 1) // 2 if rank == dst else rank + 1
    assert_same_bits(tensor, values * scale, "reduce")


def check_gather(values: Tensor, rank: int, n: int, group: Any) -> None:
    dst = values.numel() % n
    outputs = [complement(values) for _ in range(n)] if rank == dst else None
    dist.gather(values + rank, outputs, dst, group=group)
    for source, output in enumerate(outputs or ()):
        assert_same_bits(output, values + source, "gather")


def check_scatter(values: Tensor, rank: int, n: int, group: Any) -> None:
    src = values.numel() % n
    output = complement(values)
    inputs = [values + target for target in range(n)] if rank == src else None
    dist.scatter(output, inputs, src, group=group)
    assert_same_bits(output, values + rank, "scatter")


def check_all_to_all(values: Tensor, rank: int, n: int, group: Any) -> None:
    """Rank s sends to rank r as many copies as s + r, each plus n * s + r."""
    sent = [(values + n * rank + target).repeat(rank + target) for target in range(n)]
    expected = torch.cat(
        [(values + n * source + rank).repeat(source + rank) for source in range(n)]
    )
    output = complement(expected)
    numel = values.numel()
    splits = [numel * (rank + other) for other in range(n)]
    dist.all_to_all_single(output, torch.cat(sent), splits, splits, group=group)
    assert_same_bits(output, expected, "all_to_all")


COLLECTIVES = (
    *(check_all_reduce, check_all_gather, check_reduce_scatter, check_broadcast),
    *(check_reduce, check_gather, check_scatter, check_all_to_all),
)


def all_forms_of_waiting() -> list[object]:
    rank, n = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((5,), rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    doubled = doubled.wait().tolist()
    work.wait()
    work.wait()  # waiting twice is waiting once
    return [tensor.tolist(), doubled, work.is_completed(), [n * (n + 1) / 2] * 5]


def call_within_a_callback(kind: str, numel: int) -> list[float]:
    """A second operation that is issued, and waited for, when the first one's future completes."""
    rank = dist.get_rank()
    first, second = torch.full((numel,), rank + 1.0), torch.full((numel,), 10 * (rank + 1.0))
    if rank == 1:
        time.sleep(0.1)  # the others' callback comes when they have begun to wait

    def then(_: Any) -> Tensor:
        if kind == "sync":
            dist.all_reduce(second)
            return second
        work = dist.all_reduce(second, async_op=True)
        if kind == "future":
            return work.get_future().wait()[0]
        work.wait()
        return second

    future = dist.all_reduce(first, async_op=True).get_future().then(then)
    return [future.wait()[-1].item(), first[-1].item()]


def wait_for_one_that_sleeps(is_async: bool) -> float:
    """Processor seconds that waiting took."""
    tensor = torch.ones(3)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1.5)
    begin = time.process_time()
    work = dist.all_reduce(tensor, async_op=is_async)
    if is_async:
        work.wait()
    return time.process_time() - begin


# --- tests -----------------------------------------------------------------------------------------


def test_operations_on_one_tensor_run_in_the_order_of_issue(pool: Pools) -> None:
    assert [unique.tolist() for unique in pool(2).run(reduce_one_tensor_twice, 1000003)] == [
        [6.0],
        [6.0],
    ]


def test_waits_may_come_in_reverse(pool: Pools) -> None:
    for first, second in pool(2).run(wait_in_reverse, 4000037):
        assert (first.tolist(), second.tolist()) == ([3.0], [30.0])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_200_operations_in_flight_are_waited_for_in_any_order(pool: Pools, world_size: int) -> None:
    assert pool(world_size).run(wait_in_random_order, 200) == [[]] * world_size


@pytest.mark.slow
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_successive_operations_never_meet(pool: Pools, world_size: int, num_groups: int) -> None:
    arguments = (change_size_dtype_and_collective, 2000, num_groups)
    assert pool(world_size).run(*arguments, timeout=120) == [None] * world_size


def test_works_and_futures(pool: Pools) -> None:
    for value, doubled, completed, expected in pool(3).run(all_forms_of_waiting):
        assert value == expected
        assert doubled == [2 * x for x in expected]
        assert completed


@pytest.mark.slow
@pytest.mark.parametrize("numel", [3, 100_003])
@pytest.mark.parametrize("kind", ["sync", "work", "future"])
def test_callbacks_may_call_collectives(pool: Pools, kind: str, numel: int) -> None:
    """As torch's PowerSGD hook does."""
    for _ in range(3):
        assert pool(2).run(call_within_a_callback, kind, numel, timeout=5) == [[30.0, 3.0]] * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_waiters_sleep(pool: Pools, is_async: bool) -> None:
    """What a waiter takes from others is processor time, which load does not lengthen."""
    spent = pool(3).run(wait_for_one_that_sleeps, is_async)
    assert max(spent[0], spent[2]) < 0.05
