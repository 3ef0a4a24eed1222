"""One rank of a `ranks.RankGroup`: `python -m pycoll.bench.rank_main PIPE BACKEND RANK WORLD_SIZE
THREADS RENDEZVOUS`.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from pycoll.bench.collectives import Buffers
from pycoll.bench.engine import TorchPeers, measure
from pycoll.bench.ranks import Command, Ready, Refusal
from pycoll.bench.results import Sample


def main() -> None:
    pipe_fd, backend, rank, world_size, threads, rendezvous = sys.argv[1:]
    pipe: Connection[Any, Any] = Connection(int(pipe_fd))
    torch.set_num_threads(int(threads))
    try:
        dist.init_process_group(
            backend, init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world_size)
        )
    except Exception as error:
        pipe.send(Refusal(_one_line(error)))
        return
    pipe.send(Ready())
    try:
        while True:
            pipe.send(_answer(pipe.recv(), int(rank), int(world_size)))
    except (EOFError, OSError):  # the parent has closed its end: no more work
        dist.destroy_process_group()


def _answer(command: Command, rank: int, world_size: int) -> Sample | Refusal:
    try:
        return measure(Buffers(command.case, rank, world_size), TorchPeers(), command.effort)
    except Exception as error:
        return Refusal(_one_line(error))


def _one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


if __name__ == "__main__":
    main()
