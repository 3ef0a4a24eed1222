"""Pickling between the caller and its ranks: tensors of every dtype, by value.

torch's own way fails for dtypes without a typed storage (float8, uint16 and others), and that of
torch.multiprocessing shares memory with a process that may be gone by the time it is read.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def dumps(value: Any) -> bytes:
    """For `pickle.loads`. Dense CPU tensors arrive as contiguous copies, whatever they were part of."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is Tensor and value.device.type == "cpu"
        if not is_plain or value.layout != torch.strided or value.is_quantized:
            return NotImplemented
        dense = value.detach().resolve_conj().resolve_neg()
        content = dense.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        state = (bytes(content.numpy()), value.dtype, tuple(value.shape), value.requires_grad)
        return _tensor_from, state


def _tensor_from(
    content: bytes, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if content:
        tensor.view(-1).view(torch.uint8).copy_(
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
        )
    return tensor.requires_grad_(requires_grad)
