"""What this process has done last and what it is waiting for, in the format of torch's flight recorder.

``torchfrtrace DIRECTORY`` reads the files of all ranks side by side and says which rank is missing from which
operation. It knows operations by their library's prefix and rejects prefixes it does not know, so names here begin
with ``gloo:``.

``PYCOLL_FLIGHT_RECORD`` (a path's beginning, to which the rank is appended) makes every process write its file when an
operation fails, and when it gets SIGUSR1, also while it is blocked in a collective.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

VARIABLE = "PYCOLL_FLIGHT_RECORD"
VERSION = "2.10"  # of the format
_NAMES = {"barrier": "barrier", "all_to_all": "all_to_all_single"}


def dump_flight_record(prefix: str | os.PathLike[str]) -> Path:
    """Writes the last operations of all groups of this process to ``<prefix><rank>`` (the rank in the world).

    Returns:
        the file that was written; beside it ``<file>.json`` holds the same for people.

    Raises:
        OSError: it cannot be written.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    rank = dist.get_rank() if dist.is_initialized() else 0
    record: dict[str, Any] = {"version": VERSION, "pg_config": {}, "pg_status": {}, "entries": []}
    for group, ranks in list(c10d._world.pg_group_ranks.items()):
        events = _events(group)
        if events is not None:
            _add_group(record, group, sorted(ranks), events)
    record["entries"].sort(key=lambda entry: entry["time_created_ns"])
    for number, entry in enumerate(record["entries"]):
        entry["record_id"] = number
    path = Path(f"{os.fspath(prefix)}{rank}")
    _write(path, pickle.dumps(record))
    _write(path.with_name(path.name + ".json"), json.dumps(record, indent=1).encode())
    return path


def _events(group: Any) -> list[dict[str, Any]] | None:
    """Of a group of pycoll; None for others. Before the compiled part is loaded there are only others."""
    import torch

    core = sys.modules.get("pycoll._C")
    if core is None:
        return None
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    return backend.events() if isinstance(backend, core.ProcessGroupPycoll) else None


def _write(path: Path, content: bytes) -> None:
    # A reader, or a second signal, never sees half a file.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _add_group(
    record: dict[str, Any],
    group: dist.ProcessGroup,
    ranks: list[int],
    events: list[dict[str, Any]],
) -> None:
    name, description = group.group_name, group.group_desc or ""
    record["pg_config"][name] = {"name": name, "desc": description, "ranks": str(ranks)}
    record["pg_status"][name] = _status(events)
    # The recorder's clock is that of the day.
    offset = time.time_ns() - time.monotonic_ns()
    mine = group.rank()
    for event in events:
        record["entries"].append(_entry(event, (name, description), mine, len(ranks), offset))


def _status(events: list[dict[str, Any]]) -> dict[str, int]:
    collectives = [event for event in events if event["operation"] not in ("send", "recv")]
    ended = [event["sequence"] for event in collectives if event["ended_ns"]]
    started = [event["sequence"] for event in collectives if event["started_ns"]]
    queued = [event["sequence"] for event in collectives]
    return {
        "last_enqueued_collective": max(queued, default=-1),
        "last_started_collective": max(started, default=-1),
        "last_completed_collective": max(ended, default=-1),
    }


def _entry(
    event: dict[str, Any], group: tuple[str, str], rank: int, world_size: int, offset: int
) -> dict[str, Any]:
    operation, peer = event["operation"], event["peer"]
    title = _NAMES.get(operation, operation)
    is_message = operation in ("send", "recv")
    if is_message:
        title += f" {rank}{'->' if operation == 'send' else '<-'}{peer}"
    numel = event["nbytes"] // max(1, event["itemsize"])
    gathers = operation in ("all_gather", "all_to_all", "gather")
    spreads = operation in ("reduce_scatter", "all_to_all", "scatter")
    ended = event["ended_ns"]
    state = "completed" if ended else "started" if event["started_ns"] else "scheduled"
    return {
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": 0 if is_message else event["sequence"],
        "p2p_seq_id": event["sequence"] if is_message else 0,
        "op_id": event["sequence"],
        "profiling_name": f"gloo:{title}",
        "time_created_ns": event["queued_ns"] + offset,
        "time_discovered_started_ns": event["started_ns"] + offset if event["started_ns"] else None,
        "time_discovered_completed_ns": ended + offset if ended else None,
        "duration_ms": (ended - event["started_ns"]) / 1e6 if ended else None,
        "input_sizes": [[numel * world_size if spreads else numel]],
        "input_dtypes": [event["dtype"]],
        "output_sizes": [[numel * world_size if gathers else numel]],
        "output_dtypes": [event["dtype"]],
        "state": state,
        "retired": bool(ended),
        "is_p2p": is_message,
        "timeout_ms": event["timeout_ms"],
        "frames": [],
        "algorithm": event["algorithm"],
        "memory_path": event["memory_path"],
        "failed": event["failed"],
    }


def _dump_quietly(prefix: str, why: str) -> None:
    try:
        path = dump_flight_record(prefix)
        print(f"[pycoll {os.getpid()}] {why}: wrote {path}", file=sys.stderr, flush=True)
    except Exception as error:  # a record that cannot be written must not hide what it is about
        print(f"[pycoll {os.getpid()}] {why}, but: {error}", file=sys.stderr, flush=True)


def install(core: ModuleType) -> None:
    """Makes failures and SIGUSR1 write the record, if the environment asks for it. `core`: the compiled part,
    just loaded. The signal needs the main thread."""
    prefix = os.environ.get(VARIABLE)
    if not prefix:
        return
    core.set_failure_hook(lambda: _dump_quietly(prefix, "an operation failed"))
    try:
        signal.signal(signal.SIGUSR1, lambda *_: _dump_quietly(prefix, "SIGUSR1"))
    except ValueError:
        return  # not the main thread
