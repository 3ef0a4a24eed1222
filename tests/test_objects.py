"""Python objects through torch's six object collectives, over the world and over a group of some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]


def thing(rank: int, salt: int = 0) -> dict[str, Any]:
    """Pickles to another size on every rank, some of them large."""
    return {
        "rank": rank,
        "text": f"{salt}: " + "é" * (1000 * rank * rank),
        "tensor": torch.arange(3 * rank) + salt,
        "nested": [None, (rank, {"salt": salt}), b"\x00" * salt],
    }


def same(a: Any, b: Any) -> bool:
    a, b = dict(a), dict(b)
    return torch.equal(a.pop("tensor"), b.pop("tensor")) and a == b


# --- on ranks --------------------------------------------------------------------------------------


def all_six(members: list[int] | None) -> bool:
    """members: of a group, in ascending order; None: the world."""
    rank = dist.get_rank()
    group = None if members is None else dist.new_group(members)
    members = members or list(range(dist.get_world_size()))
    if rank not in members:
        return True
    n, first, last = len(members), members[0], members[-1]
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, thing(rank), group=group)
    assert all(same(gathered[i], thing(r)) for i, r in enumerate(members))
    at_last: list[Any] | None = [None] * n if rank == last else None
    dist.gather_object(thing(rank, 1), at_last, last, group=group)
    assert all(same(at_last[i], thing(r, 1)) for i, r in enumerate(members) if at_last)
    objects: list[Any] = [thing(rank, 2), rank, None] if rank == last else [None] * 3
    dist.broadcast_object_list(objects, last, group=group)
    assert same(objects[0], thing(last, 2))
    assert objects[1:] == [last, None]
    scattered: list[Any] = [None]
    everybodys = [thing(r, 3) for r in members] if rank == last else None
    dist.scatter_object_list(scattered, everybodys, last, group=group)
    assert same(scattered[0], thing(rank, 3))
    if n > 1 and rank == first:
        dist.send_object_list([thing(rank, 4), "second"], last, group=group)
    elif n > 1 and rank == last:
        received: list[Any] = [None, None]
        assert dist.recv_object_list(received, first, group=group) == first
        assert same(received[0], thing(first, 4))
        assert received[1] == "second"
    if group is not None:
        dist.destroy_process_group(group)
    return True


def object_that_cannot_be_pickled() -> str:
    objects: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(objects, lambda: None)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    dist.all_gather_object(objects, dist.get_rank())
    assert objects == list(range(dist.get_world_size()))
    return text


# --- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_objects_of_all_ranks(pool: Pools, world_size: int) -> None:
    assert all(pool(world_size).run(all_six, None))


@pytest.mark.parametrize("members", [[1, 3], [0, 1, 2], [2]])
def test_objects_of_a_group(pool: Pools, members: list[int]) -> None:
    assert all(pool(4).run(all_six, members))


def test_what_cannot_be_pickled_leaves_the_group_usable(pool: Pools) -> None:
    assert all("pickle" in text for text in pool(2).run(object_that_cannot_be_pickled))
