"""`pycoll info`: what this installation is and what it sees."""

from __future__ import annotations

import os
import platform
import resource

import pycoll
from pycoll.backend import extension
from pycoll.cli.rows import print_rows


def _limit(number: int) -> str:
    soft = resource.getrlimit(number)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"


def facts() -> dict[str, str]:
    """Names and values, in the order in which they are shown.

    Raises:
        ImportError: the compiled part is missing, or was built for another torch.
    """
    import torch

    from pycoll import _build, _cuda, triton_kernels

    core = extension()
    return {
        "pycoll": pycoll.__version__,
        "built for torch": _build.TORCH_VERSION,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "vector instructions": core.instruction_set(),
        "usable cores": f"{core.usable_cores()} of {os.cpu_count()} (affinity and cgroup quota)",
        "memory paths": "staged through shared memory (memfd)",
        "GPU kernels": _cuda.describe(),
        "Triton kernels": triton_kernels.describe(),
        "open files (ulimit -n)": _limit(resource.RLIMIT_NOFILE),
        "address space (ulimit -v)": _limit(resource.RLIMIT_AS),
        "file size (ulimit -f)": _limit(resource.RLIMIT_FSIZE),
        "algorithms": ", ".join(core.algorithm_names()),
    }


def print_info() -> int:
    try:
        shown = facts()
    except ImportError as error:
        print(error)
        return 1
    print_rows(list(shown.items()))
    variables = []
    for name, default, agreed, meaning in extension().environment():
        meaning += " (ranks must agree)" if agreed else ""
        variables.append((name, os.environ.get(name, ""), default, meaning))
    print()
    print_rows(variables, ("variable", "value", "default", "meaning"))
    return 0
