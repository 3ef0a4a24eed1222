"""Ranks within one process: a group whose members are devices, driven by one thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from pycoll.backend import extension

_TIMEOUT = timedelta(minutes=5)
# Its stubs lack some of the names.
api: Any = _distributed_c10d


class LocalGroup:
    """A communicator for each of `world_size` ranks, all in this process.

    Tensors are given for all ranks at once. Values go from rank 0 to all (`spread`) and are added up on rank 0
    (`collect`) in two halves each, so that every rank moves about twice the data whatever the number of ranks. Were
    rank 0 to deal with each of the others, it would move world_size - 1 times the data.

    Args:
        world_size: 2 at least.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 2:
            raise ValueError(f"a local group has 2 ranks at least, got {world_size}")
        self.world_size = world_size
        self._backends: list[Any] = [None] * world_size
        failures: list[BaseException] = []
        store = api.HashStore()

        def join(rank: int) -> None:
            options = api._DistributedBackendOptions()
            options.store = store
            options.group_rank, options.group_size = rank, world_size
            options.global_ranks_in_group = list(range(world_size))
            options.group_id = "pycoll_local"
            try:
                self._backends[rank] = extension().create(options, "", "", "", _TIMEOUT)
            except BaseException as error:
                failures.append(error)

        # Making a group waits for all its ranks.
        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def bytes_moved(self) -> list[int]:
        """Written to and read from shared memory by each rank, in its last 1024 operations."""
        return [
            sum(event["bytes_written"] + event["bytes_read"] for event in backend.events())
            for backend in self._backends
        ]

    def spread(self, source: Tensor) -> list[Tensor]:
        """`source`, (numel,) of rank 0, on all ranks: parts to each rank, which they then show each other.

        Returns:
            a tensor for each rank, the first being `source` itself.
        """
        numel = source.numel()
        flat = self._padded(source)
        mine = [part.clone() for part in flat.chunk(self.world_size)]
        works = []
        for rank, backend in enumerate(self._backends):
            options = api.ScatterOptions()
            options.rootRank, options.asyncOp = 0, True
            lists = [list(flat.chunk(self.world_size))] if rank == 0 else []
            works.append(backend.scatter([mine[rank]], lists, options))
        _wait(works)
        results = [torch.empty_like(flat) for _ in self._backends]
        works = []
        for rank, backend in enumerate(self._backends):
            gather: Any = api.AllgatherOptions()
            gather.asyncOp = True
            works.append(backend._allgather_base(results[rank], mine[rank], gather))
        _wait(works)
        return [result[:numel] for result in results]

    def collect(self, values: Sequence[Tensor]) -> Tensor:
        """The sum of the ranks' tensors, (numel,) each, in rank order; on rank 0: every rank adds up a part."""
        padded = [self._padded(value) for value in values]
        sums = [value[: len(value) // self.world_size].clone() for value in padded]
        works = []
        for rank, backend in enumerate(self._backends):
            options: Any = api.ReduceScatterOptions()
            options.reduceOp, options.asyncOp = api.ReduceOp.SUM, True
            works.append(backend._reduce_scatter_base(sums[rank], padded[rank], options))
        _wait(works)
        total = torch.empty_like(padded[0])
        works = []
        for rank, backend in enumerate(self._backends):
            gather = api.GatherOptions()
            gather.rootRank, gather.asyncOp = 0, True
            lists = [list(total.chunk(self.world_size))] if rank == 0 else []
            works.append(backend.gather(lists, [sums[rank]], gather))
        _wait(works)
        return total[: len(values[0])]

    def _padded(self, flat: Tensor) -> Tensor:
        """With as many zeros behind as make equal parts."""
        missing = -len(flat) % self.world_size
        return torch.cat((flat, flat.new_zeros(missing))) if missing else flat


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
