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

__all__ = ["Options", "__version__", "algorithm_names", "events"]

_LAZY = {"algorithm_names": "pycoll.backend", "events": "pycoll.backend"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pycoll' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
