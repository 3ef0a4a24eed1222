"""Groups out of groups."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from pycoll.backend import backend_of

if TYPE_CHECKING:
    import torch.distributed as dist


def dead_ranks(group: dist.ProcessGroup | None = None) -> list[int]:
    """Ranks of the group (in the group's numbers) whose process has ended without leaving it, as far as this
    rank can tell now."""
    return cast("list[int]", backend_of(group).dead_ranks())


def _agree_on_dead(backend: Any, store: Any, timeout: timedelta) -> list[int]:
    """The dead ranks of a group, the same on all that live.

    In each round every rank publishes whom it takes for dead, and reads what the others say. It is settled when all
    views are equal: then all who live have read the same views, since what was published stays readable after its
    author's death.

    Raises:
        TimeoutError: a rank that lives has not called within `timeout`.
    """
    rank, deadline = backend.rank(), time.monotonic() + timeout.total_seconds()
    dead = set(backend.dead_ranks())
    turn = 0
    while True:
        store.set(f"pycoll_dead/{turn}/{rank}", json.dumps(sorted(dead)))
        views = [set(dead)]
        for other in range(backend.size()):
            if other == rank or other in dead:
                continue
            key = f"pycoll_dead/{turn}/{other}"
            while not store.check([key]):
                if other in backend.dead_ranks() and not store.check([key]):
                    dead.add(other)
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {other} lives but has not called shrink within {timeout}"
                    )
                time.sleep(0.005)
            else:
                views.append(set(json.loads(store.get(key))))
        if all(view == dead for view in views):
            return sorted(dead)
        dead = dead.union(*views)
        turn += 1


def shrink(
    group: dist.ProcessGroup | None = None, exclude: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """A group of those who are left, for going on after a death.

    Collective over the ranks that stay; the others need not live. What was pending on the old group is ended with
    an error. The default group is replaced by the new one, and all other groups are destroyed, since ranks of
    the world are numbered anew.

    Args:
        group: None: the default group.
        exclude: ranks of the group that are left out, the same on all ranks that stay. None: the dead
            ones, on which the ranks that stay agree first.

    The ranks meet at the group's store, which has to live on: a file, or a server outside the ranks, as torchrun's
    is. The server inside rank 0 ends with it.

    Returns:
        the new group; ranks keep their order.

    Raises:
        ValueError: nobody is to be left out, or this rank itself.
        TimeoutError: a rank that lives has not called it within the group's timeout.
    """
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    pg: Any = dist.group.WORLD if group is None else group
    backend = backend_of(pg)
    is_default = pg is dist.group.WORLD
    if is_default and (exclude or backend.dead_ranks()):
        _abort_all_but(pg)
    if exclude is None:
        store = c10d._get_process_group_store(pg)
        excluded = _agree_on_dead(backend, store, backend.options._timeout)
    else:
        excluded = sorted(exclude)
    if not excluded:
        raise ValueError("every rank of the group is alive; name those to leave out with exclude")
    smaller: Any = c10d.shrink_group(excluded, group, shrink_flags=c10d.SHRINK_ABORT)
    if is_default:
        _agree_on_names(smaller)
    return smaller


def _abort_all_but(kept: Any) -> None:
    """Who waits in another group for this rank, which has gone on, would not come before that group's timeout."""
    import torch.distributed.distributed_c10d as c10d

    for group in list(c10d._world.pg_map):
        if group is kept:
            continue
        with suppress(ValueError):  # another backend's
            backend_of(group).abort()


def _agree_on_names(group: Any) -> None:
    """torch numbers groups as they are made. Ranks that were making one when the death was noticed, or were not
    yet, go on from the same number."""
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    count = torch.tensor([c10d._world.group_count])
    dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
    c10d._world.group_count = int(count.item())
