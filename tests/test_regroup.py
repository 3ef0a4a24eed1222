"""New groups out of old ones: split, merged, shrunk, subgroups, meshes; what they inherit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scripts import assert_codes, run_script

import pycoll
from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]

BACKENDS = ["cpu:pycoll", "pycoll"]


@pytest.fixture(scope="module")
def own_pool() -> Iterator[Callable[[str, int], RankPool]]:
    """`own_pool(backend, world_size)`: a group that cannot be made costs its ranks."""
    pools: dict[tuple[str, int], RankPool] = {}

    def pool_of(backend: str, world_size: int) -> RankPool:
        key = (backend, world_size)
        return pools.setdefault(key, RankPool(world_size, backend, timeout=30))

    yield pool_of
    for opened in pools.values():
        opened.close()


# --- on ranks --------------------------------------------------------------------------------------


def cpu_backend(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu"))


def sum_of_ranks(group: dist.ProcessGroup, numel: int = 1009) -> float:
    """The sum of the members' ranks in the world, having looked at every element."""
    ramp = torch.arange(numel, dtype=torch.float64)
    x = ramp + dist.get_rank()
    group.allreduce([x]).wait()
    assert torch.equal(x - x[0], ramp * group.size())
    return float(x[0])


def split_by_parity(times: int) -> list[tuple[int, int, float]]:
    """Of four ranks: this one's number in its half, the half's size and sum."""
    rank = dist.get_rank()
    results = []
    for turn in range(times):
        half = dist.group.WORLD.split_group(
            [r for r in range(4) if r % 2 == rank % 2],
            timeout=timedelta(seconds=5),
            group_name=f"parity {rank % 2}, {turn}",
        )
        results.append((half.rank(), half.size(), sum_of_ranks(half)))
    return results


def split_off_some() -> float | None:
    """Ranks 1 and 3 of four; the others take part in the call and get nothing."""
    some = dist.group.WORLD.split_group([1, 3], timeout=timedelta(seconds=5))
    return None if some is None else sum_of_ranks(some, 100_003)


def split_of_a_ring() -> tuple[str, str]:
    ring = dist.new_group(pg_options=pycoll.Options(algorithm="ring"))
    part = ring.split_group([0, 1, 3] if dist.get_rank() != 2 else [2], timedelta(seconds=5))
    sum_of_ranks(part)
    return cpu_backend(part).algorithm, cpu_backend(dist.group.WORLD).algorithm


def merge_two_halves() -> tuple[int, float]:
    """Two groups that know nothing of each other but a store."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = [0] if rank == 0 else list(range(1, n))
    half = dist.new_group(mine, use_local_synchronization=True)
    store = dist.PrefixStore("meeting", dist.distributed_c10d._get_default_store())
    merged = half.merge_remote_group(store, n, timeout=timedelta(seconds=5), group_name="merged")
    return merged.size(), sum_of_ranks(merged)


def shrink_a_group() -> tuple[list[int], int, float] | None:
    group = dist.new_group()
    sum_of_ranks(group)
    if dist.get_rank() in (0, 2):
        return None
    smaller = dist.distributed_c10d.shrink_group([0, 2], group=group)
    members = dist.get_process_group_ranks(smaller)
    return members, dist.get_rank(smaller), sum_of_ranks(smaller)


def shrink_wrongly() -> list[str]:
    backend = cpu_backend(dist.group.WORLD)
    texts = []
    for excluded in ([7], [-1], [dist.get_rank()]):
        try:
            backend.shrink(excluded)
            texts.append("nothing was raised")
        except ValueError as error:
            texts.append(str(error))
    sum_of_ranks(dist.group.WORLD)
    return texts


def subgroups_of_torch() -> list[tuple[int, float]]:
    results = []
    pair, pairs = dist.new_subgroups(2)
    assert len(pairs) == 2
    results.append((dist.get_rank(pair), sum_of_ranks(pair)))
    crossed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    results.append((dist.get_rank(crossed), sum_of_ranks(crossed)))
    return results


def mesh_of_two_dims() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = [sum_of_ranks(mesh.get_group(name)) for name in ("replicate", "shard")]
    assert dist.get_backend(mesh.get_group("shard")) == "pycoll"
    assert tuple(mesh.get_coordinate()) == divmod(dist.get_rank(), 2)
    flat = mesh["replicate", "shard"]._flatten("both")
    results.append(sum_of_ranks(flat.get_group()))
    assert flat.mesh.tolist() == [0, 1, 2, 3]
    results.append(sum_of_ranks(mesh["shard"].get_group()))
    return results


def timeouts_of_groups() -> list[str]:
    """Of a group made with its own timeout, of one that is given another one, of one with Options."""
    rank = dist.get_rank()
    groups = [
        dist.new_group(timeout=timedelta(milliseconds=210)),
        dist.new_group(),
        dist.new_group(pg_options=pycoll.Options(timeout=timedelta(milliseconds=230))),
    ]
    groups[1].set_timeout(timedelta(milliseconds=220))
    texts = []
    for group in groups:
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(3), group=group)
            except RuntimeError as error:
                texts.append(str(error))
        dist.barrier()
    sum_of_ranks(dist.group.WORLD)
    return texts


def sequence_numbers() -> list[int]:
    rank, n = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    backend = cpu_backend(group)
    x, y = torch.ones(n), torch.ones(n)
    numbers = [backend._get_sequence_number_for_group()]
    pieces = [torch.ones(1) for _ in range(n)]
    for call in (
        lambda: dist.all_reduce(x, group=group),
        lambda: dist.barrier(group=group),
        lambda: dist.broadcast(x, 0, group=group),
        lambda: dist.reduce(x, 0, group=group),
        lambda: dist.gather(x[:1], pieces if rank == 0 else None, 0, group=group),
        lambda: dist.scatter(y[:1], pieces if rank == 0 else None, 0, group=group),
        lambda: dist.all_to_all_single(y, x, group=group),
        lambda: dist.all_gather(pieces, x[:1], group=group),
        lambda: dist.reduce_scatter(y[:1], pieces, group=group),
    ):
        call()
        numbers.append(backend._get_sequence_number_for_group())
    works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(3)]
    numbers.append(backend._get_sequence_number_for_group())
    for work in works:
        work.wait()
    for source in range(n - 1):  # messages are not counted
        if rank == source:
            dist.send(x, source + 1, group=group)
        elif rank == source + 1:
            dist.recv(x, source, group=group)
    return [*numbers, backend._get_sequence_number_for_group()]


# --- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_split_into_halves(own_pool: Callable[[str, int], RankPool], backend: str) -> None:
    even, odd = (0, 2, 2.0), (0, 2, 4.0)
    assert own_pool(backend, 4).run(split_by_parity, 2) == [
        [even] * 2,
        [odd] * 2,
        [(1, 2, 2.0)] * 2,
        [(1, 2, 4.0)] * 2,
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_split_off_some_ranks(own_pool: Callable[[str, int], RankPool], backend: str) -> None:
    assert own_pool(backend, 4).run(split_off_some) == [None, 4.0, None, 4.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_inherit_options(own_pool: Callable[[str, int], RankPool], backend: str) -> None:
    assert own_pool(backend, 4).run(split_of_a_ring) == [("ring", "auto")] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_merge_of_groups_that_share_a_store(
    own_pool: Callable[[str, int], RankPool], backend: str
) -> None:
    assert own_pool(backend, 4).run(merge_two_halves) == [(4, 6.0)] * 4


def test_shrink_to_the_ranks_that_call(pool: Pools) -> None:
    assert pool(4).run(shrink_a_group) == [None, ([1, 3], 0, 4.0), None, ([1, 3], 1, 4.0)]


def test_shrinking_by_ranks_that_cannot_go_is_refused(pool: Pools) -> None:
    for rank, (beyond, negative, itself) in enumerate(pool(2).run(shrink_wrongly)):
        assert "ranks_to_exclude contains 7, which is not a rank of this group of 2" in beyond
        assert "ranks_to_exclude contains -1" in negative
        assert f"rank {rank} excludes itself" in itself


@pytest.mark.slow
def test_survivors_of_a_death_shrink_the_world_and_go_on(tmp_path: Path) -> None:
    script = """
        from torch.distributed.distributed_c10d import SHRINK_ABORT, shrink_group
        init()
        x = torch.full((70_001,), rank + 1.0); dist.all_reduce(x)
        if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        text, _ = raised(lambda: dist.all_reduce(x))
        assert "rank 1" in text, text
        group = shrink_group([1], shrink_flags=SHRINK_ABORT)
        assert group is dist.group.WORLD and dist.get_world_size() == 2
        assert dist.get_rank() == rank // 2
        for numel in (1, 70_001):
            x = torch.full((numel,), rank + 1.0); dist.all_reduce(x)
            assert x.unique().tolist() == [4.0]
        dist.destroy_process_group()
    """
    ended = run_script(script, 3, tmp_path)
    assert_codes(ended, 0, -9, 0)


def test_subgroups_as_torch_makes_them(pool: Pools) -> None:
    assert pool(4).run(subgroups_of_torch) == [
        [(0, 1.0), (0, 3.0)],
        [(1, 1.0), (0, 3.0)],
        [(0, 5.0), (1, 3.0)],
        [(1, 5.0), (1, 3.0)],
    ]


def test_a_mesh_of_two_dims(pool: Pools) -> None:
    assert pool(4).run(mesh_of_two_dims) == [
        [2.0, 1.0, 6.0, 1.0],
        [4.0, 1.0, 6.0, 1.0],
        [2.0, 5.0, 6.0, 5.0],
        [4.0, 5.0, 6.0, 5.0],
    ]


def test_every_group_has_its_timeout(pool: Pools) -> None:
    texts = pool(2).run(timeouts_of_groups)[0]
    assert len(texts) == 3
    for text, milliseconds in zip(texts, (210, 220, 230), strict=True):
        assert f"Timed out waiting {milliseconds} ms for rank 1" in text


def test_collectives_are_numbered_and_messages_are_not(pool: Pools) -> None:
    assert pool(3).run(sequence_numbers) == [[*range(10), 12, 12]] * 3
