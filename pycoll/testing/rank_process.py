"""The side of a rank: join the group, then run what the pool sends until told to stop."""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

from pycoll.backend import register
from pycoll.testing.pickling import dumps

# A rank that is stuck writes its stacks this long before the deadline, so that the error has them.
DUMP_LEAD_S = 0.5


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    kind: "raised" an exception; "died" without one, by a signal or an exit; was "stuck" at the
        deadline; was "left" unfinished, and killed, because another rank had failed.
    text: the traceback, or what is known instead of one.
    exception: the exception itself, where there was one and it could be pickled.
    when: seconds of the monotonic clock, which all processes of a host share.
    """

    rank: int
    kind: Literal["raised", "died", "stuck", "left"]
    text: str
    exception: BaseException | None = None
    when: float = 0.0

    def headline(self) -> str:
        """One line: the last of the traceback, or the first of what is known instead."""
        lines = self.text.strip().splitlines() or [""]
        return f"rank {self.rank} {self.kind}: {lines[-1 if self.kind == 'raised' else 0]}"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a rank needs to know to join its group.

    tcp_port: of the pool's TCPStore, or None for a FileStore in `directory`.
    directory: of the pool, for the store and for what a rank leaves behind if it hangs.
    """

    rank: int
    world_size: int
    backend: str
    group_timeout: timedelta
    tcp_port: int | None
    pg_options: bytes  # pickled
    env: dict[str, str]
    directory: Path

    @property
    def progress_file(self) -> Path:
        return self.directory / f"progress-{self.rank}"

    @property
    def stacks_file(self) -> Path:
        return self.directory / f"stacks-{self.rank}"


@dataclasses.dataclass(frozen=True)
class Task:
    fn: Callable[..., Any]
    args: tuple[Any, ...]


# Set in rank processes only, where it never changes.
_this_rank: Setup | None = None


def report_progress(text: str) -> None:
    """Called on a rank: say what it is about to do, for the error message if it dies or hangs."""
    if _this_rank is not None:
        _this_rank.progress_file.write_text(text)


def serve(connection: Connection, setup: Setup) -> None:
    """The main function of a rank: run tasks until told to stop (an empty message)."""
    global _this_rank
    _this_rank = setup
    threading.Thread(target=_exit_with_parent, daemon=True, name="exit-with-parent").start()
    os.environ.update(setup.env)
    for name in set(os.environ) - set(setup.env):
        del os.environ[name]
    torch.set_num_threads(1)
    with setup.stacks_file.open("w") as stacks:
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:  # the caller is gone
                os._exit(1)
            if not message:
                break
            path, deadline, payload = pickle.loads(message)
            sys.path[:] = path
            importlib.invalidate_caches()
            report_progress("")
            until_dump = max(0.1, deadline - time.monotonic() - DUMP_LEAD_S)
            faulthandler.dump_traceback_later(until_dump, file=stacks)
            report = _run_task(setup.rank, payload)
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(report)
    if dist.is_initialized():
        dist.destroy_process_group()


def init_group() -> None:
    """The first task of every rank."""
    assert _this_rank is not None
    setup = _this_rank
    register()  # in a source tree that is not installed, `import torch` has not done it
    store: Any
    if setup.tcp_port is None:
        store = FileStore(str(setup.directory / "store"), setup.world_size)
        store.set_timeout(setup.group_timeout)
    else:
        store = TCPStore("127.0.0.1", setup.tcp_port, is_master=False, timeout=setup.group_timeout)
    dist.init_process_group(
        setup.backend,
        store=store,
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=setup.group_timeout,
        pg_options=pickle.loads(setup.pg_options),
    )


def _run_task(rank: int, payload: bytes) -> bytes:
    """The report to send back: the result or a RankFailure, pickled."""
    try:
        task: Task = pickle.loads(payload)
        return dumps(task.fn(*task.args))
    except BaseException as error:
        when = time.monotonic()
        # The first frame is this function's own and tells a reader nothing.
        frames = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, frames))
        failure = RankFailure(rank, "raised", text, when=when)
        try:
            carried = dumps(dataclasses.replace(failure, exception=error))
            pickle.loads(carried)  # some exceptions can be pickled but not unpickled
        except Exception:
            return dumps(failure)
        return carried


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
