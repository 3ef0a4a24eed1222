"""Groups: of one, of some, made in any order, several at once; ranks outside."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

import pycoll
from pycoll.testing import RankPool

Pool = Callable[[int], RankPool]


def sum_of(group: dist.ProcessGroup | None, numel: int = 1009) -> float:
    x = torch.arange(numel, dtype=torch.float64) + dist.get_rank()
    dist.all_reduce(x, group=group)
    assert torch.equal(
        x - x[0], torch.arange(numel, dtype=torch.float64) * dist.get_world_size(group)
    )
    return float(x[0])


def group_of_one() -> bool:
    fds = len(os.listdir("/proc/self/fd"))
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    x = torch.tensor([3.0, 5.0])
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        dist.all_reduce(x, op=op, group=group)
    assert x.tolist() == [3.0, 5.0]
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5), group=group)
    assert x.tolist() == [1.5, 2.5]
    out = torch.zeros(2)
    dist.all_gather_into_tensor(out, x, group=group)
    assert out.tolist() == [1.5, 2.5]
    dist.reduce_scatter_tensor(x, out * 2, group=group)
    assert x.tolist() == [3.0, 5.0]
    me = dist.get_rank()
    dist.broadcast(x, me, group=group)
    dist.reduce(x, me, dist.ReduceOp.AVG, group=group)
    dist.gather(x, [out], me, group=group)
    dist.scatter(x, [out * 2], me, group=group)
    dist.all_to_all([out], [x], group=group)
    dist.all_to_all_single(x, out / 2, group=group)
    dist.all_to_all_single(out, x * 4, [2], [2], group=group)
    assert (x.tolist(), out.tolist()) == ([3.0, 5.0], [12.0, 20.0])
    dist.barrier(group=group)
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work.wait()
    assert work.is_completed()
    assert work.get_future().wait()[0].tolist() == [3.0, 5.0]
    assert len(os.listdir("/proc/self/fd")) == fds  # no sockets, no memory
    dist.destroy_process_group(group)
    return True


def test_group_of_one_is_the_identity_and_owns_nothing(pool: Pool) -> None:
    assert pool(2).run(group_of_one) == [True, True]


def world_of_one() -> list[float]:
    return [sum_of(None), float(dist.get_world_size())]


def test_world_of_one(pool: Pool) -> None:
    assert pool(1).run(world_of_one) == [[0.0, 1.0]]


def outside() -> object:
    group = dist.new_group([0, 1])
    x = torch.full((3,), dist.get_rank() + 1.0)
    work = dist.all_reduce(x, group=group, async_op=True)
    dist.barrier(group=group)
    dist.broadcast(x, 0, group=group)
    if work is not None:
        work.wait()
    found = x.tolist(), dist.get_rank(group), work is None
    dist.barrier()
    return found


def test_ranks_outside_a_group_are_left_alone(pool: Pool) -> None:
    inside = ([3.0] * 3, 0, False), ([3.0] * 3, 1, False)
    assert pool(3).run(outside) == [*inside, ([3.0] * 3, -1, True)]


def disjoint() -> float:
    mine = [0, 3] if dist.get_rank() in (0, 3) else [1, 2]
    group = dist.new_group(mine, use_local_synchronization=True)
    total = sum_of(group)
    dist.destroy_process_group(group)
    return total


def test_disjoint_groups_made_at_the_same_time(pool: Pool) -> None:
    # torch names such groups by the number of groups that a rank is in: it must be the same for all.
    pool(4).kill()
    assert pool(4).run(disjoint) == [3.0] * 4


def only_its_own() -> float:
    """new_group is collective over the world, but each rank names only the group it is in."""
    mine = [0, 3] if dist.get_rank() in (0, 3) else [1, 2]
    return sum_of(dist.new_group(mine))


def test_each_rank_names_only_its_own_group(pool: Pool) -> None:
    assert pool(4).run(only_its_own) == [3.0] * 4


def interleaved(turns: int) -> bool:
    """Asynchronous operations on three groups, issued in an order that differs from rank to rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    for turn in range(turns):
        numel = (1, 5003, 70001)[turn % 3]
        tensors = [torch.full((numel,), float(rank + 10 * i)) for i in range(3)]
        order = [(rank + turn + i) % 3 for i in range(3)]
        works = {i: dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order}
        for i in reversed(order):
            works[i].wait()
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full((numel,), n * (n - 1) / 2 + 10.0 * i * n))
    for group in groups:
        dist.destroy_process_group(group)
    return True


def test_several_groups_interleaved(pool: Pool) -> None:
    for world_size in (2, 4):
        assert all(pool(world_size).run(interleaved, 30))


def threads_with_groups_of_their_own() -> bool:
    from concurrent.futures import ThreadPoolExecutor

    groups = [dist.new_group() for _ in range(3)]

    def work(index: int) -> None:
        for turn in range(60):
            x = torch.full((17 + 3001 * (turn % 2),), float(dist.get_rank() + index))
            dist.all_reduce(x, group=groups[index])
            assert torch.equal(x, torch.full_like(x, 1.0 + 2 * index))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    return True


def test_several_threads_each_with_a_group(pool: Pool) -> None:
    assert all(pool(2).run(threads_with_groups_of_their_own))


def ring_bytes(numel: int) -> tuple[int, int]:
    group = dist.new_group(pg_options=pycoll.Options(algorithm="ring"))
    dist.all_reduce(torch.ones(numel), group=group)
    event = pycoll.events(group)[-1]
    assert event["algorithm"] == "ring"
    assert event["nbytes"] == 4 * numel
    dist.destroy_process_group(group)
    return event["bytes_written"], event["bytes_read"]


def test_ring_moves_two_times_n_minus_1_tensors_in_all(pool: Pool) -> None:
    """Each of n chunks makes n - 1 hops to be summed and n - 1 to be spread; chunks may be uneven."""
    for world_size in (2, 3, 4):
        numel = 100_003
        counts = pool(world_size).run(ring_bytes, numel)
        total = 2 * (world_size - 1) * 4 * numel
        assert sum(written for written, _ in counts) == total
        assert sum(read for _, read in counts) == total


def more_ranks_than_cores() -> bool:
    rank, n = dist.get_rank(), dist.get_world_size()
    for turn in range(200):
        x = torch.full((2 + 5003 * (turn % 2),), float(rank))
        dist.all_reduce(x)
        assert torch.equal(x, torch.full_like(x, n * (n - 1) / 2))
        dist.barrier()
    return True


def test_more_ranks_than_cores(pool: Pool) -> None:
    for world_size in (4, 8):
        assert all(pool(world_size).run(more_ranks_than_cores))
