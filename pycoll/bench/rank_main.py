"""One rank of a `ranks.RankGroup`: `python -m pycoll.bench.rank_main` with `Invitation`'s fields."""

from __future__ import annotations

import sys
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
import torch.distributed as dist

from pycoll.bench.background import measure_beside
from pycoll.bench.buffers import Buffers
from pycoll.bench.engine import Alone, Peers, TorchPeers
from pycoll.bench.peers import MPI, Peer
from pycoll.bench.ranks import Command, Hello, Invitation, Ready, Refusal
from pycoll.bench.results import Sample


class Rank:
    """A rank that has joined, and what it measures with."""

    def __init__(self, invitation: Invitation) -> None:
        self._peer, self._device = Peer.parse(invitation.peer), invitation.device
        torch.set_num_threads(invitation.threads)
        if invitation.device == "cuda":
            torch.cuda.set_device(invitation.rank % torch.cuda.device_count())
        self.rank, self.world_size = invitation.rank, invitation.world_size
        self.facts: dict[str, Any] = {}
        if self._peer.kind == MPI:
            api = self._peer.api()
            self.rank, self.world_size = api.rank, api.world_size
            self._clock_peers: Peers = api
            self.facts["library"] = api.library
            return
        self._join(invitation)
        meets = self._peer.meets
        self._clock_peers = TorchPeers(device=invitation.device) if meets else Alone()

    def _join(self, invitation: Invitation) -> None:
        if not self._peer.meets:
            # Importing it registers the backend that does nothing.
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group(
                self._peer.backend, store=FakeStore(), rank=self.rank, world_size=self.world_size
            )
            return
        dist.init_process_group(
            self._peer.backend,
            init_method=f"file://{invitation.rendezvous}",
            rank=self.rank,
            world_size=self.world_size,
            pg_options=self._peer.options,
        )

    def answer(self, command: Command) -> Sample | Refusal:
        """What was measured, or why it was not."""
        try:
            checks = command.effort.checks and self._peer.moves_data
            effort = replace(command.effort, checks=checks)
            buffers = Buffers(command.case, self.rank, self.world_size, self._peer.api())
            sample = measure_beside(
                buffers, self._clock_peers, effort, self._device, command.beside_products
            )
        except Exception as error:
            return Refusal(one_line(error))
        return with_choice(sample, self._peer, command.case.op)

    def leave(self) -> None:
        if self._peer.kind != MPI:
            dist.destroy_process_group()


def with_choice(sample: Sample, peer: Peer, op: str, group: Any = None) -> Sample:
    """The sample with the algorithm and the memory path of pycoll's last operation, from its stream of events;
    unchanged for others.
    """
    if not peer.is_pycoll:
        return sample
    from pycoll import events

    name = "send" if op == "send_recv" else op
    for event in reversed(events(group)):
        if event["operation"] == name:
            path = event.get("memory_path")
            return replace(sample, algorithm=event["algorithm"] or None, memory_path=path)
    return sample


def one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def main() -> None:
    invitation = Invitation.from_arguments(sys.argv[1:])
    pipe: Connection[Any, Any] = Client(invitation.address, "AF_UNIX")
    try:
        rank = Rank(invitation)
    except Exception as error:
        pipe.send(Hello(invitation.rank))
        pipe.send(Refusal(one_line(error)))
        return
    pipe.send(Hello(rank.rank))
    pipe.send(Ready(rank.facts))
    try:
        while True:
            pipe.send(rank.answer(pipe.recv()))
    except (EOFError, OSError):  # the parent has closed its end: no more work
        rank.leave()


if __name__ == "__main__":
    main()
