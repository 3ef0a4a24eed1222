"""Triton kernels: collectives over memory that peers map, buckets, block-wise quantisation (docs/triton.md).

Triton is optional. Importing this package does not import it; its modules do, each with a kernel and its launcher:

    from pycoll.triton_kernels.group import TritonGroup
    from pycoll.triton_kernels.collectives import all_reduce
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def triton_version() -> str | None:
    """Of the installed Triton; None if there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def describe() -> str:
    """What `pycoll info` says."""
    found = triton_version()
    if found is None:
        return "none: Triton is not installed (pip install triton)"
    return f"with Triton {found}"
