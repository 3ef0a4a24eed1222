"""CUDA kernels, run on the CPU by the simulator, for tests in Python.

`simulated_kernels()` puts them behind the operators of pycoll.ops, so that a test of the operators becomes a test of
the kernels; the functions call collective kernels for all ranks at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Sequence

import torch
from cuda_sim_programs import FOLDER, build
from torch import Tensor

from pycoll import _core

# In the order of csrc/base/dtype.h and reduce_op.h; None: no dtype of torch that kernels reduce.
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    None,
    None,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
ALGORITHMS = ("one_shot", "two_shot", "ring", "ring_ll128")
MESSAGE_BYTES = 10_000
LIBRARY_VARIABLE = "PYCOLL_TEST_SIMULATOR"


def library_path() -> str:
    """Of the simulator. The first process makes it; its children, whose time is limited, find it made."""
    if LIBRARY_VARIABLE not in os.environ:
        build("none", ["libpycoll_sim.so"])
        os.environ[LIBRARY_VARIABLE] = str(FOLDER / "build/none/libpycoll_sim.so")
    return os.environ[LIBRARY_VARIABLE]


@functools.cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(library_path())
    loaded.pycoll_sim_immediate_device.restype = ctypes.c_void_p
    loaded.pycoll_sim_num_launches.restype = ctypes.c_uint64
    return loaded


@contextlib.contextmanager
def simulated_kernels() -> Iterator[None]:
    """Within it pycoll's operators, called by this thread, run simulated CUDA kernels."""
    core = _core.load()
    before = core.set_simulated_device(library().pycoll_sim_immediate_device())
    try:
        yield
    finally:
        core.set_simulated_device(before)


def num_launches() -> int:
    """Of kernels that operators have launched so far."""
    return int(library().pycoll_sim_num_launches())


class _Call(ctypes.Structure):
    """Call of tests/sim/library.cpp."""

    _fields_ = (
        ("dtype", ctypes.c_int),
        ("op", ctypes.c_int),
        ("world_size", ctypes.c_int),
        ("wire_dtype", ctypes.c_int),
        ("wire_block", ctypes.c_size_t),
        ("numel", ctypes.c_size_t),
        ("inputs", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
    )


def _run(
    function: ctypes._CFuncPtr,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    numel: int,
    *arguments: int,
    op: str = "sum",
    factors: Sequence[float] | None = None,
    wire_dtype: torch.dtype | None = None,
    block: int = 128,
    seed: int = 7,
) -> list[Tensor]:
    n = len(inputs)
    pointers = ctypes.c_void_p * n
    ins, outs = (pointers(*(t.data_ptr() for t in tensors)) for tensors in (inputs, outputs))
    scales = (ctypes.c_double * n)(*(factors or [1.0] * n))
    call = _Call(
        DTYPES.index(inputs[0].dtype),
        OPS.index(op),
        n,
        DTYPES.index(wire_dtype) if wire_dtype else 0,
        block if wire_dtype else 0,
        numel,
        ctypes.addressof(ins),
        ctypes.addressof(outs),
        ctypes.addressof(scales),
        seed,
    )
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    status = function(ctypes.byref(call), *arguments, message, ctypes.c_size_t(MESSAGE_BYTES))
    if status != 0:
        raise RuntimeError(message.value.decode())
    return list(outputs)


def all_reduce(inputs: Sequence[Tensor], algorithm: str, **how: object) -> list[Tensor]:
    """Every rank's output, of one-dimensional inputs. `how`: op, factors, wire_dtype, block, seed."""
    outputs = [torch.empty_like(x) for x in inputs]
    index = ALGORITHMS.index(algorithm)
    function = library().pycoll_sim_all_reduce
    return _run(function, inputs, outputs, inputs[0].numel(), index, **how)  # type: ignore[arg-type]


def reduce_scatter(inputs: Sequence[Tensor], **how: object) -> list[Tensor]:
    """Inputs of (ranks, numel)."""
    outputs = [torch.empty_like(x[0]) for x in inputs]
    function = library().pycoll_sim_reduce_scatter
    return _run(function, inputs, outputs, inputs[0].shape[1], **how)  # type: ignore[arg-type]


def all_gather(inputs: Sequence[Tensor], **how: object) -> list[Tensor]:
    """Outputs of (ranks, numel), on a quantised wire."""
    outputs = [x.new_empty(len(inputs), x.numel()) for x in inputs]
    function = library().pycoll_sim_all_gather
    return _run(function, inputs, outputs, inputs[0].numel(), **how)  # type: ignore[arg-type]
