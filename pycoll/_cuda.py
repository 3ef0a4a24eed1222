"""The library of CUDA kernels, if this build has one."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType

LIBRARY = Path(__file__).with_name("libpycoll_cuda.so")


def load() -> ctypes.CDLL:
    """The library. It holds the CUDA runtime; no driver is needed to load it.

    Raises:
        ImportError: this build has none; the message says why.
    """
    from pycoll import _build

    if not LIBRARY.is_file():
        raise ImportError(f"this build of pycoll has no CUDA kernels: {_build.CUDA}")
    library = ctypes.CDLL(str(LIBRARY))
    library.pycoll_cuda_error_name.restype = ctypes.c_char_p
    library.pycoll_cuda_launchers.restype = ctypes.c_void_p
    library.pycoll_cuda_driver.restype = ctypes.c_void_p
    return library


def install(core: ModuleType) -> None:
    """Gives the compiled part the kernels, where torch has tensors for them and this build has kernels."""
    import torch

    if torch.version.cuda is None or not LIBRARY.is_file():
        return
    library = load()
    core.set_cuda_library(library.pycoll_cuda_launchers(), library.pycoll_cuda_driver())


def describe() -> str:
    """What this build has, and the GPUs that it sees."""
    from pycoll import _build

    if not LIBRARY.is_file():
        return f"none: {_build.CUDA}"
    library = load()
    num_devices = library.pycoll_cuda_num_devices()
    if num_devices < 0:
        reason = library.pycoll_cuda_error_name(-num_devices).decode()
        return f"{_build.CUDA}; no GPU here ({reason})"
    return f"{_build.CUDA}; {num_devices} GPUs here"
