"""pycoll's version, and the refusal to run inside a torch that it was not built for."""

from __future__ import annotations

import re
from pathlib import Path

__version__ = "0.1.0"


def check_torch_version(built: str, found: str) -> None:
    """Raise ImportError unless `built` and `found` are the same minor version of torch.

    The base class of torch's communication backends gets new virtual functions with every minor
    version, so a binary built for another one would call the wrong function. Patch releases and
    local suffixes (`+cpu`, `+cu130`) are interchangeable.
    """
    if _minor_version(built) == _minor_version(found):
        return
    raise ImportError(
        f"pycoll {__version__} was built for torch {built}, but torch {found} is installed: "
        "a build serves one minor version of torch. "
        f"Build it again for this torch: {_rebuild_command()}"
    )


def _minor_version(version: str) -> str:
    match = re.match(r"\d+\.\d+", version)
    return match.group() if match else version


def _rebuild_command() -> str:
    source_tree = Path(__file__).resolve().parents[1]
    if (source_tree / "setup.py").is_file():  # an editable install: its source tree is known
        return f"pip install --no-build-isolation -e {source_tree}"
    return "pip install --no-build-isolation . (in pycoll's source tree)"
