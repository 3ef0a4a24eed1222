"""Ranks that torchrun (or another launcher that sets RANK and WORLD_SIZE) has started already: all of them run the same
program, and each peer gets a process group of its own among them.

Measuring is a collective call here. Rank 0 prints; the figures are the same on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pycoll.bench.background import measure_beside
from pycoll.bench.buffers import Buffers
from pycoll.bench.cases import Case
from pycoll.bench.engine import Alone, Effort, Peers, TorchPeers
from pycoll.bench.peers import DIRECT, FLOOR, MAPPED, MPI, SYMMETRIC, Peer
from pycoll.bench.rank_main import one_line, with_choice
from pycoll.bench.ranks import RankError, Refusal
from pycoll.bench.results import Sample

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def world_size_here(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks a launcher has started; None if none did."""
    return int(environment["WORLD_SIZE"]) if all(name in environment for name in NEEDED) else None


def why_not(peer: Peer) -> str | None:
    """Why a peer cannot be measured among torchrun's ranks, or None."""
    if peer.kind in (MPI, FLOOR, SYMMETRIC, DIRECT, MAPPED):
        return f"{peer.kind} starts its own ranks: run pycoll bench without torchrun"
    return None


def join(timeout: float) -> None:
    """The default group of this program's ranks, which only agree on figures over it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))


class JoinedGroup:
    """A process group of a peer's backend among all ranks; see `compare.Ranks`."""

    def __init__(
        self, peer: str, world_size: int, timeout: float = 120.0, *, device: str = "cpu"
    ) -> None:
        if world_size != dist.get_world_size():
            raise RankError(
                f"{world_size} ranks are wanted, torchrun started {dist.get_world_size()}"
            )
        self._peer, self._device = Peer.parse(peer), device
        self.facts: dict[str, Any] = {}
        self._group: Any = dist.new_group(
            backend=self._peer.backend,
            timeout=timedelta(seconds=timeout),
            pg_options=self._peer.options,
        )
        meets = self._peer.meets
        self._clock_peers: Peers = TorchPeers(self._group, device) if meets else Alone()

    def wait_until_ready(self) -> None:
        dist.barrier()

    def measure(
        self, case: Case, effort: Effort, beside_products: bool = False
    ) -> Sample | Refusal:
        """As `ranks.RankGroup.measure`."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self._mine(case, effort, beside_products))
        refusals = [answer for answer in everyone if isinstance(answer, Refusal)]
        if refusals and len(refusals) < len(everyone):
            raise RankError(f"{self._peer.name}: not all ranks refused {case}: {refusals[0]}")
        return refusals[0] if refusals else Sample.slowest(everyone)

    def _mine(self, case: Case, effort: Effort, beside_products: bool) -> Sample | Refusal:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        try:
            buffers = Buffers(case, rank, world_size, _InGroup(self._group))
            sample = measure_beside(
                buffers, self._clock_peers, effort, self._device, beside_products
            )
        except Exception as error:
            return Refusal(one_line(error))
        return with_choice(sample, self._peer, case.op, self._group)

    def __enter__(self) -> JoinedGroup:
        return self

    def __exit__(self, *what: Any) -> None:
        dist.destroy_process_group(self._group)


class _InGroup:
    """torch.distributed's functions, bound to a group of all ranks."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        if name in ("all_reduce_into", "send_recv", "zeros"):  # what torch.distributed lacks
            raise AttributeError(name)
        function = getattr(dist, name)
        if name in ("isend", "irecv", "batch_isend_irecv"):
            return function

        def within(*args: Any, **kwargs: Any) -> Any:
            return function(*args, group=self._group, **kwargs)

        return within


def is_first() -> bool:
    """Whether this rank prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def leave() -> None:
    """The ranks part."""
    if dist.is_initialized():
        dist.destroy_process_group()
