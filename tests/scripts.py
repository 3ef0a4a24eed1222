"""Ranks as real interpreters that run a script to its end: for exits, signals and deaths.

A script finds RANK, WORLD_SIZE and STORE (a path for a file store) in its environment, and `PRELUDE`
before its own lines.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PRELUDE = """
import os, sys, time, signal, datetime
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def seconds(s): return datetime.timedelta(seconds=s)
def init(backend="pycoll", timeout=60, **kw):
    dist.init_process_group(backend, init_method="file://" + os.environ["STORE"], rank=rank,
                            world_size=world_size, timeout=seconds(timeout), **kw)
def say(*words): print(*words, flush=True)
def mark(name): open(os.environ["STORE"] + "." + name + str(rank), "w").close()
def raised(fn):
    begin = time.monotonic()
    try: fn()
    except Exception as error: return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing was raised", time.monotonic() - begin
"""


@dataclass
class Ended:
    code: int  # as subprocess gives it: negative for a signal
    out: str
    err: str
    seconds: float  # from the start of all ranks to this one's end


class Ranks:
    """The processes of one script. Use as a context manager: what is left is killed at the end."""

    def __init__(self, script: str, world_size: int, directory: Path, **env: str) -> None:
        self.store = directory / "store"
        source = PRELUDE + textwrap.dedent(script)
        self.started = time.monotonic()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", source],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "STORE": str(self.store),
                    "OMP_NUM_THREADS": "1",
                    **env,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()

    def wait_for_mark(self, name: str, rank: int, timeout: float = 60) -> None:
        """Until the script of `rank` has called mark(name)."""
        path = Path(f"{self.store}.{name}{rank}")
        wait_until(path.exists, timeout, f"rank {rank} did not reach {name!r}")

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def end(self, timeout: float = 90) -> list[Ended]:
        """Waits for all; a rank that does not end is killed and fails the test."""
        deadline = time.monotonic() + timeout
        ended: list[Ended] = []
        for rank, process in enumerate(self.processes):
            try:
                out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise AssertionError(
                    f"rank {rank} did not end within {timeout} s\n{out}\n{err}"
                ) from None
            ended.append(Ended(process.returncode, out, err, time.monotonic() - self.started))
        return ended


def run_script(
    script: str, world_size: int, directory: Path, timeout: float = 90, **env: str
) -> list[Ended]:
    with Ranks(script, world_size, directory, **env) as ranks:
        return ranks.end(timeout)


def assert_codes(ended: list[Ended], *codes: int) -> None:
    found = tuple(rank.code for rank in ended)
    texts = "\n".join(f"rank {i}: {r.out}{r.err}" for i, r in enumerate(ended))
    assert found == codes, f"exit codes {found}, wanted {codes}\n{texts}"


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
