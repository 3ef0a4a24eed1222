"""The caller's side: start ranks, give them work, and let none of them hang or get lost."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from torch._C._distributed_c10d import TCPStore

from pycoll.testing.pickling import dumps
from pycoll.testing.rank_process import (
    DUMP_LEAD_S,
    RankFailure,
    Setup,
    Task,
    init_group,
    serve,
)

T = TypeVar("T")

# After one rank has failed, the others get this long to say what they saw before they are killed.
GRACE_S = 3.0
# How long ranks may take to leave the group and exit when asked to.
EXIT_S = 15.0

_live_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()


class RankError(RuntimeError):
    """At least one rank failed.

    rank: the one that failed first. failures: all that were seen, that one first.
    Where the first failure was an exception that could be pickled, it is the `__cause__`.
    """

    def __init__(self, what: str, failures: Sequence[RankFailure]) -> None:
        # A dead rank is the cause of what its peers then raise; a stuck one waits for another.
        order = {"died": 0, "raised": 1, "stuck": 2, "left": 3}
        self.failures = sorted(failures, key=lambda f: (order[f.kind], f.when, f.rank))
        first = self.failures[0]
        self.rank = first.rank
        # Of ranks that are stuck together none is more to blame than another.
        full = [f for f in self.failures if f is first or first.kind == f.kind == "stuck"]
        parts = [f"{what}: rank {f.rank} {f.kind}\n{f.text.rstrip()}" for f in full]
        others = [f"  {f.headline()}" for f in self.failures if f not in full]
        if others:
            parts.append("\n".join(["the other ranks that failed:", *others]))
        super().__init__("\n\n".join(parts))


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "pycoll",
    timeout: float = 60.0,
    store: Literal["file", "tcp"] = "file",
    pg_options: Any = None,
    env: Mapping[str, str] | None = None,
    return_failures: bool = False,
) -> list[Any]:
    """Run ``fn(*args)`` once on `world_size` new ranks and return their results in rank order.

    fn: a module-level function (it is pickled by name), called with the process group set up.
    timeout: seconds for everything, from the start of the processes to the last result.
    store, pg_options, env: see `RankPool`.
    return_failures: let every rank run to its end or to the deadline, and put a `RankFailure` in
        the place of a failed rank's result instead of raising. For tests that kill ranks.
    """
    deadline = time.monotonic() + timeout
    pool = RankPool(
        world_size, backend, timeout=timeout, store=store, pg_options=pg_options, env=env
    )
    try:
        pool.start(deadline)
        outcomes = pool._call(Task(fn, args), deadline, wait_for_all=return_failures)
        failures = _failures_in(outcomes)
        if failures and not return_failures:
            _raise_first(f"{_name_of(fn)} on {world_size} ranks", failures)
        if not failures:
            pool.close()
        return outcomes
    finally:
        pool.kill()


class RankPool:
    """Ranks that stay: processes in a process group, on which functions run one after the other.

    backend: of torch.distributed.
    timeout: seconds for the start and for each `run` that names no other. Three quarters of it are
        the process group's own timeout, so that the backend can report a stuck collective before
        the ranks are killed.
    store: how the ranks find each other. "file" is a file in a temporary directory; "tcp" is a
        TCPStore that lives in this process, so that it outlives every rank.
    pg_options: for `init_process_group`; must be picklable.
    env: variables to set in the ranks, on top of this process's own.

    After a failure all ranks are killed, and the next `run` starts new ones. `close`, which is what
    leaving the `with` block does, ends them in order and raises if one does not end well.
    """

    def __init__(
        self,
        world_size: int,
        backend: str = "pycoll",
        *,
        timeout: float = 60.0,
        store: Literal["file", "tcp"] = "file",
        pg_options: Any = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1; got {world_size}")
        if store not in ("file", "tcp"):
            raise ValueError(f"store must be 'file' or 'tcp'; got {store!r}")
        self.world_size = world_size
        self.backend = backend
        self.timeout = timeout
        self._store_kind = store
        self._pg_options = pg_options
        self._env = dict(env or {})
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._setups: list[Setup] = []
        self._directory: Path | None = None
        self._tcp_store: Any = None
        _live_pools.add(self)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids in rank order; empty while no ranks are running."""
        return [process.pid for process in self._processes if process.pid is not None]

    def start(self, deadline: float | None = None) -> None:
        """Start the ranks unless they are running.

        deadline: in seconds of `time.monotonic`; the pool's timeout from now unless given.
        """
        if self._processes:
            return
        if deadline is None:
            deadline = time.monotonic() + self.timeout
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "pycoll.testing"])
        self._directory = Path(tempfile.mkdtemp(prefix="pycoll-ranks-"))
        self._setups = self._make_setups(self._directory)
        try:
            for setup in self._setups:
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                _bound_blocking(ours, GRACE_S)
                name = f"rank {setup.rank}"
                process = context.Process(target=serve, args=(theirs, setup), name=name)
                process.start()
                self._processes.append(process)
                theirs.close()
            failures = _failures_in(self._call(Task(init_group, ()), deadline))
        except BaseException:
            self.kill()
            raise
        if failures:
            what = f"starting {self.world_size} ranks with backend {self.backend!r}"
            _raise_first(what, failures)

    def run(self, fn: Callable[..., T], *args: Any, timeout: float | None = None) -> list[T]:
        """Run ``fn(*args)`` on every rank and return the results in rank order.

        fn: a module-level function (it is pickled by name).
        timeout: seconds for this call, instead of the pool's.
        """
        self.start()
        limit = self.timeout if timeout is None else timeout
        outcomes = self._call(Task(fn, args), time.monotonic() + limit)
        failures = _failures_in(outcomes)
        if failures:
            _raise_first(f"{_name_of(fn)} on {self.world_size} ranks", failures)
        return outcomes

    def close(self) -> None:
        """End the ranks in order; raise `RankError` if one hangs or dies on its way out."""
        deadline = time.monotonic() + EXIT_S
        for connection in self._connections:
            # A rank that is dead already is found below, by its exit code.
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        failures = []
        for rank, process in enumerate(self._processes):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                text = f"did not exit within {EXIT_S:g} s of being asked to"
                failures.append(RankFailure(rank, "stuck", text))
            elif process.exitcode:
                failures.append(RankFailure(rank, "died", f"{_exit_of(process)} while exiting"))
        self.kill()
        if failures:
            _raise_first(f"ending {self.world_size} ranks", failures)

    def kill(self) -> None:
        """Kill the ranks at once; a later `run` starts new ones."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(EXIT_S)
        for connection in self._connections:
            connection.close()
        self._processes = []
        self._connections = []
        self._setups = []
        self._tcp_store = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _make_setups(self, directory: Path) -> list[Setup]:
        port = None
        if self._store_kind == "tcp":
            self._tcp_store = TCPStore(
                "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=self.timeout)
            )
            port = self._tcp_store.port
        return [
            Setup(
                rank=rank,
                world_size=self.world_size,
                backend=self.backend,
                group_timeout=timedelta(seconds=0.75 * self.timeout),
                tcp_port=port,
                pg_options=dumps(self._pg_options),
                env={**os.environ, **self._env},
                directory=directory,
            )
            for rank in range(self.world_size)
        ]

    def _call(self, task: Task, deadline: float, *, wait_for_all: bool = False) -> list[Any]:
        """What each rank returned, or its `RankFailure`; after a failure no rank is left alive."""
        message = dumps((list(sys.path), deadline, dumps(task)))
        outcomes: dict[int, Any] = {}
        try:
            for rank, connection in enumerate(self._connections):
                try:
                    connection.send_bytes(message)
                except OSError:
                    outcomes[rank] = self._death_of(rank)
            self._collect(outcomes, deadline, wait_for_all)
            missing = [rank for rank in range(self.world_size) if rank not in outcomes]
            timed_out = time.monotonic() >= deadline
            if missing and timed_out:
                # On a loaded machine a rank may write its stacks a moment late.
                time.sleep(DUMP_LEAD_S)
            for rank in missing:
                outcomes[rank] = self._unfinished(rank, timed_out)
            if _failures_in(outcomes.values()):
                self.kill()
        except BaseException:
            self.kill()
            raise
        return [outcomes[rank] for rank in range(self.world_size)]

    def _collect(self, outcomes: dict[int, Any], deadline: float, wait_for_all: bool) -> None:
        """Fill in reports as they come, until all are there or the time to wait for them is up."""
        waiting = {rank for rank in range(self.world_size) if rank not in outcomes}
        in_grace = wait_for_all
        while waiting:
            if not in_grace and _failures_in(outcomes.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
                in_grace = True
            signs: list[Any] = [self._connections[rank] for rank in waiting]
            signs += [self._processes[rank].sentinel for rank in waiting]
            ready = wait_for_any(signs, max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for rank in sorted(waiting):
                if self._connections[rank] in ready or self._processes[rank].sentinel in ready:
                    outcomes[rank] = self._report_of(rank)
                    waiting.remove(rank)

    def _report_of(self, rank: int) -> Any:
        connection = self._connections[rank]
        # A rank may have died after it reported: its end does not mean that it said nothing.
        with contextlib.suppress(EOFError, OSError):
            if connection.poll():
                return pickle.loads(connection.recv_bytes())
        return self._death_of(rank)

    def _death_of(self, rank: int) -> RankFailure:
        process = self._processes[rank]
        process.join(GRACE_S)
        text = f"{_exit_of(process)}{self._progress_of(rank)}"
        return RankFailure(rank, "died", text, when=time.monotonic())

    def _unfinished(self, rank: int, timed_out: bool) -> RankFailure:
        if not timed_out:
            text = f"still running {GRACE_S:g} s after another rank failed{self._progress_of(rank)}"
            return RankFailure(rank, "left", text, when=time.monotonic())
        stacks = _read(self._setups[rank].stacks_file) or "(it wrote no stacks)"
        text = (
            f"still running at the deadline{self._progress_of(rank)}; "
            f"its threads, most recent call first:\n{stacks}"
        )
        return RankFailure(rank, "stuck", text, when=time.monotonic())

    def _progress_of(self, rank: int) -> str:
        progress = _read(self._setups[rank].progress_file)
        return f", last at {progress!r}" if progress else ""


def _bound_blocking(connection: Connection, seconds: float) -> None:
    """Let no send or receive on this end block longer, should a rank stop in mid-message."""
    interval = struct.pack("@ll", int(seconds), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as twin:
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)


def _failures_in(outcomes: Any) -> list[RankFailure]:
    return [outcome for outcome in outcomes if isinstance(outcome, RankFailure)]


def _name_of(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"


def _exit_of(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None:
        return "no longer answers but is still running"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _raise_first(what: str, failures: Sequence[RankFailure]) -> NoReturn:
    error = RankError(what, failures)
    raise error from error.failures[0].exception


@atexit.register
def _kill_all_ranks() -> None:
    # Called before multiprocessing's own handler, which would wait for the ranks to end.
    for pool in list(_live_pools):
        pool.kill()
