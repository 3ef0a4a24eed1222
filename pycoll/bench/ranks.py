"""The ranks of one backend as child processes, which measure on command.

The parent holds one pipe a rank. A rank that dies closes its pipe, and a parent that dies closes
them all, so that neither side waits for the other for ever. Ranks without a command block on their
pipe and use no CPU: several groups can live side by side and be measured in turn.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from pycoll.bench.collectives import Case
from pycoll.bench.engine import Effort
from pycoll.bench.results import Sample

_SECONDS_TO_LEAVE = 5.0


@dataclass(frozen=True)
class Command:
    """Measure this case."""

    case: Case
    effort: Effort


@dataclass(frozen=True)
class Ready:
    """A rank has joined its process group."""


@dataclass(frozen=True)
class Refusal:
    """A rank raised while it measured; the group is still usable if every rank did."""

    reason: str


class RankError(RuntimeError):
    """A rank died, stayed silent past the timeout, or disagreed with the others: its group is
    unusable.
    """


class RankGroup:
    """`world_size` processes in one process group of `backend`; a context manager that ends them.

    Args:
        backend: name registered with torch.distributed.
        world_size: ranks to start.
        timeout: seconds that an answer may take.
        threads: torch's intra-op threads in each rank.
    """

    def __init__(
        self, backend: str, world_size: int, timeout: float = 120.0, threads: int = 1
    ) -> None:
        self.backend, self.world_size, self.timeout = backend, world_size, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="pycoll-bench-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection[Any, Any]] = []
        try:
            for rank in range(world_size):
                self._start(rank, threads)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, threads: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._pipes.append(ours)
        arguments = [
            theirs.fileno(),
            self.backend,
            rank,
            self.world_size,
            threads,
            Path(self._folder.name) / "rendezvous",
        ]
        with theirs, self._log(rank).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pycoll.bench.rank_main", *map(str, arguments)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal is for the parent, which then ends its ranks.
                start_new_session=True,
            )
        self._processes.append(process)

    def wait_until_ready(self) -> None:
        """Returns when every rank has joined. Raises RankError if one cannot."""
        for rank, answer in enumerate(self._answers()):
            if not isinstance(answer, Ready):
                raise self._failure(rank, f"could not join: {getattr(answer, 'reason', answer)}")

    def measure(self, case: Case, effort: Effort) -> Sample | Refusal:
        """Times one case on all ranks. A refusal is one that every rank agreed on.

        Raises:
            RankError: if the group can no longer be used.
        """
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(Command(case, effort))
            except OSError:
                raise self._failure(rank, "died") from None
        answers = self._answers()
        refusals = [answer for answer in answers if isinstance(answer, Refusal)]
        if len(refusals) == len(answers):
            return refusals[0]
        for rank, answer in enumerate(answers):
            if not isinstance(answer, Sample):
                raise self._failure(
                    rank, f"alone refused {case}: {getattr(answer, 'reason', answer)}"
                )
        return replace(answers[0], wrong=max(answer.wrong for answer in answers))

    def _answers(self) -> list[Any]:
        """One answer from each rank, in rank order."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < self.world_size:
            silent = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            readable = wait(list(silent), timeout=max(0.0, deadline - time.monotonic()))
            if not readable:
                raise self._failure(min(silent.values()), f"gave no answer in {self.timeout:g} s")
            for pipe in readable:
                assert isinstance(pipe, Connection)
                rank = silent[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise self._failure(rank, "died") from None
        return [answers[rank] for rank in range(self.world_size)]

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"

    def _failure(self, rank: int, what: str) -> RankError:
        log = (
            self._log(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
        )
        said = "; its last output:\n  " + "\n  ".join(log) if log else ""
        return RankError(f"{self.backend}: rank {rank} of {self.world_size} {what}{said}")

    def close(self) -> None:
        """Ends the ranks: a closed pipe tells them to leave, and those still there after a while
        are killed.
        """
        for pipe in self._pipes:
            pipe.close()
        end_processes(self._processes, _SECONDS_TO_LEAVE)
        self._folder.cleanup()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            for process in self._processes:
                process.kill()
        self.close()


def end_processes(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Waits up to `seconds` altogether for children of this process to leave by themselves, then
    kills them.
    """
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
