"""Ranks as threads of one process, each with a stream of its own: several ranks on one GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from pycoll.backend import extension

# Its stubs lack some of the names.
api: Any = _distributed_c10d
DEVICES = ("cpu", "cuda")


def run_streams(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    scope: Callable[[int], AbstractContextManager[Any]] | None = None,
    algorithm: str = "",
    timeout: timedelta = timedelta(seconds=60),
) -> list[Any]:
    """Runs ``fn(group, *args)`` in `world_size` threads and returns their results in rank order.

    Each thread is a rank of `group`, a process group that it passes on: ``dist.all_reduce(x, group=group)``. Roots,
    sources and destinations are named by ``group_src`` and ``group_dst``. Where torch sees a GPU, a thread's current
    stream is one of its own. Set ``CUDA_MODULE_LOADING=EAGER`` before torch starts CUDA: a kernel that is
    loaded while another rank's waits may wait for it.

    Args:
        fn: a function; threads share all that it refers to.
        world_size: number of ranks.
        scope: what a rank's thread is to be within, by rank. None: a stream of its own, if there is a GPU.
        algorithm: as in `pycoll.Options`; empty: the environment's.
        timeout: of every operation. Threads cannot be killed: what waits beyond it would wait for ever.

    Raises:
        BaseException: the first error of a rank.
    """
    enter = scope or _stream_of_its_own
    store = api.HashStore()
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def be_rank(rank: int) -> None:
        try:
            group, backend = _make_group(store, rank, world_size, algorithm, timeout)
            with enter(rank):
                try:
                    results[rank] = fn(group, *args)
                finally:
                    backend.shutdown()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=be_rank, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _make_group(
    store: Any, rank: int, world_size: int, algorithm: str, timeout: timedelta
) -> tuple[dist.ProcessGroup, Any]:
    options = api._DistributedBackendOptions()
    options.store = store
    options.group_rank, options.group_size = rank, world_size
    options.global_ranks_in_group = list(range(world_size))
    options.group_id = "pycoll_streams"
    backend = extension().create(options, algorithm, "", "", timeout)
    group: Any = dist.ProcessGroup(store, rank, world_size)
    for device in DEVICES:
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group, backend


@contextlib.contextmanager
def _stream_of_its_own(rank: int) -> Any:
    if not torch.cuda.is_available():
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
