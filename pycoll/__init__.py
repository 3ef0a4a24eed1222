"""pycoll: collectives for PyTorch that one can read, and that never hang or lie.

``init_process_group("pycoll")`` is all that a program needs. Names here are loaded when first used, so
that ``import pycoll`` stays cheap and does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pycoll._version import __version__
from pycoll.options import Options

if TYPE_CHECKING:
    from pycoll.backend import algorithm_names, events
    from pycoll.collectives import (
        all_gather,
        all_gather_into_tensor,
        all_reduce,
        all_to_all,
        all_to_all_single,
        barrier,
        broadcast,
        gather,
        monitored_barrier,
        reduce,
        reduce_scatter,
        reduce_scatter_tensor,
        scatter,
    )

__all__ = [
    "Options",
    "__version__",
    "algorithm_names",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "events",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
]

# Where the names come from that are not loaded here.
_LAZY = {
    name: "pycoll.backend" if name in ("algorithm_names", "events") else "pycoll.collectives"
    for name in __all__
    if name not in ("Options", "__version__")
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pycoll' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
