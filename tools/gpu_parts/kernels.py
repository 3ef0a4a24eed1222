"""Kernels of libpycoll_cuda.so that know no ranks, called without torch's operators."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pycoll import _cuda

# In the order of struct Launchers (csrc/kernels/cuda/library.h).
LAUNCHERS = (
    "barrier",
    "all_reduce_one_shot",
    "all_reduce_two_shot",
    "all_reduce_ring",
    "has_multimem",
    "all_reduce_multimem",
    "reduce_scatter_multimem",
    "all_gather_multimem",
    "reduce_scatter_direct",
    "reduce_scatter_ring",
    "all_gather_ring",
    "all_gather_quantised",
    "exchange_direct",
    "flatten",
    "unflatten",
    "quantise",
    "dequantise",
    "reduce_mapped",
    "send_mapped",
)
# In the order of enum DType (csrc/base/dtype.h).
DTYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


class LaunchConfig(ctypes.Structure):
    _fields_ = (("num_blocks", ctypes.c_int), ("threads_per_block", ctypes.c_int))


class BucketArgs(ctypes.Structure):
    _fields_ = (
        ("tensors", ctypes.c_void_p),
        ("num_tensors", ctypes.c_size_t),
        ("bucket", ctypes.c_void_p),
        ("bucket_numel", ctypes.c_size_t),
        ("direction", ctypes.c_uint8),
        ("tensor_dtype", ctypes.c_uint8),
        ("bucket_dtype", ctypes.c_uint8),
        ("scale", ctypes.c_double),
        ("device_scale", ctypes.c_void_p),
        ("accumulate", ctypes.c_bool),
        ("amax", ctypes.c_void_p),
    )


@cache
def _launcher(name: str) -> Any:
    table = ctypes.cast(_cuda.load().pycoll_cuda_launchers(), ctypes.POINTER(ctypes.c_void_p))
    address = table[LAUNCHERS.index(name)]
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, LaunchConfig, ctypes.c_void_p)
    return kind(address)


class Bucket:
    """Tensors of one dtype on a GPU, and the flat tensor that holds their elements."""

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor, scale: float = 1.0) -> None:
        rows, begin = [], 0
        for tensor in tensors:
            rows.append((tensor.data_ptr(), tensor.numel(), begin))
            begin += tensor.numel()
        self._table = torch.tensor(rows, dtype=torch.int64).to(flat.device)
        properties = torch.cuda.get_device_properties(flat.device)
        self._config = LaunchConfig(4 * properties.multi_processor_count, 256)
        self._args = BucketArgs(
            tensors=self._table.data_ptr(),
            num_tensors=len(rows),
            bucket=flat.data_ptr(),
            bucket_numel=begin,
            tensor_dtype=DTYPES[tensors[0].dtype],
            bucket_dtype=DTYPES[flat.dtype],
            scale=scale,
        )

    def launch(self, direction: str) -> None:
        """`direction`: flatten or unflatten; into the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        _launcher(direction)(ctypes.addressof(self._args), self._config, stream)
