"""Registration with torch.distributed, and the doors that a process group opens.

``import torch`` calls :func:`register` through the ``torch.backends`` entry point. It must stay cheap
and must never raise: an exception there would break ``import torch`` for everybody. So it only leaves
a creator behind; the compiled part is loaded when the first group is made (or at once, where
``PYCOLL_SHARED_ALLOC=1`` asks for its allocator).
"""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from pycoll import _core, _cuda, flight_recorder, tuning
from pycoll.options import Options

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

NAME = "pycoll"
# One object serves both devices: two custom backends in one group would be taken for one another.
DEVICES = ["cpu", "cuda"]

_extension: ModuleType | None = None


def register() -> None:
    """Makes ``"pycoll"`` a backend of torch.distributed. Safe to call again; never raises."""
    try:
        import torch.distributed as dist

        if dist.is_available() and not hasattr(dist.Backend, NAME.upper()):
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
        if _wants_shared_allocator():
            core = extension()
            core.install_shared_allocator()
            core.set_shared_for_process(True)
    except Exception as error:
        import warnings

        warnings.warn(
            f"pycoll could not be registered with torch.distributed: {error}", stacklevel=2
        )


def _wants_shared_allocator() -> bool:
    text = os.environ.get("PYCOLL_SHARED_ALLOC", "")
    if text not in ("", "0", "1"):
        raise ValueError(f"PYCOLL_SHARED_ALLOC is {text!r}; set 1, or 0, or unset it")
    return text == "1"


def extension() -> ModuleType:
    """The compiled part.

    Raises:
        ImportError: it was built for another minor version of torch, or not at all.
    """
    global _extension
    if _extension is None:
        core = _core.load()
        # Before the interpreter goes: threads that need it end, what was issued is completed.
        atexit.register(core.prepare_for_exit)
        _extension = core
        flight_recorder.install(core)
        _cuda.install(core)
    return _extension


def _create(group: Any, pg_options: object) -> Any:
    """Called by torch on every rank of a new group (``register_backend(extended_api=True)``)."""
    core = extension()
    table = device_table = None
    if isinstance(pg_options, core.BackendOptions):  # inherited from the parent of a split group
        options = Options(algorithm=pg_options.algorithm)
        table, device_table = pg_options.tuning, pg_options.device_tuning
    elif pg_options is None:
        options = Options()
    elif isinstance(pg_options, Options):
        options = pg_options
    else:
        raise TypeError(
            f"pg_options is a {type(pg_options).__name__}; the pycoll backend takes pycoll.Options"
        )
    if options.debug is not None:
        core.set_log_level(options.debug)
    timeout = group.timeout if options.timeout is None else options.timeout
    if table is None:
        table = tuning.current()
    if device_table is None:
        device_table = tuning.current_for_devices()
    algorithm = options.algorithm or ""
    return core.create(group, algorithm, table, device_table, cast(timedelta, timeout))


def backend_of(group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> Any:
    """The pycoll backend of a group.

    Args:
        group: a process group; None: the default group.
        device: the device whose backend is wanted.

    Raises:
        ValueError: the group's backend for that device is another one.
        TypeError: `group` is no process group.
    """
    import torch
    import torch.distributed as dist

    pg: Any = dist.group.WORLD if group is None else group
    if device == "cpu" and (found := extension().backend_of(pg)) is not None:
        return found
    if pg is None:
        raise ValueError("there is no default group; call init_process_group first")
    if not isinstance(pg, dist.ProcessGroup):
        raise TypeError(
            f"group is {pg!r}, not a process group; on a rank outside a group torch.distributed.new_group "
            "returns GroupMember.NON_GROUP_MEMBER, and that rank makes no calls on it"
        )
    backend = pg._get_backend(torch.device(device))
    if not isinstance(backend, extension().ProcessGroupPycoll):
        raise ValueError(
            f"the backend of this group for {device} is {type(backend).__name__}, not pycoll's; "
            'make the group with backend="pycoll"'
        )
    return backend


def events(group: dist.ProcessGroup | None = None) -> list[dict[str, Any]]:
    """The last 1024 operations of this rank in a group, oldest first.

    Each is a dict: sequence, operation, algorithm, memory_path (how peers reached the tensors: payload, staged,
    mapped or readv), dtype, wire_dtype (how elements travelled), itemsize, op, peer (root, source or
    destination, else -1), nbytes of the user's data, bytes_written for and bytes_read from peers,
    timeout_ms, queued_ns, started_ns, ended_ns (of ``time.monotonic_ns()``; 0: not yet), failed.
    Operations that have not ended come last.
    """
    return cast("list[dict[str, Any]]", backend_of(group).events())


def algorithm_names() -> list[str]:
    """Names that ``Options(algorithm=...)`` takes."""
    return cast("list[str]", extension().algorithm_names())
