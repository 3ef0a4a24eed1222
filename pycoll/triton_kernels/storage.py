"""How kernels see tensors: in one dimension, of a dtype that Triton has on every GPU."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT_BYTES = 16
# Elements that kernels take as integers and convert themselves, or that are integers.
_AS_INTEGERS = {
    torch.bfloat16: (torch.uint16, "bfloat16"),
    torch.float8_e4m3fn: (torch.uint8, "float8_e4m3fn"),
    torch.float8_e5m2: (torch.uint8, "float8_e5m2"),
    torch.bool: (torch.uint8, "bool"),
}
_FLOATS = (torch.float64, torch.float32, torch.float16)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Storage:
    """A tensor as a kernel sees it, and its kind (elements.py)."""

    tensor: Tensor
    kind: str

    @property
    def itemsize(self) -> int:
        return self.tensor.element_size()

    @property
    def unit_numel(self) -> int:
        return UNIT_BYTES // self.itemsize

    @property
    def is_aligned(self) -> bool:
        return self.tensor.data_ptr() % UNIT_BYTES == 0


def storage_of(tensor: Tensor, op: str) -> Storage:
    """For kernels that compute. The parts of complex numbers are elements, except in a product."""
    flat = tensor.view(-1)
    if tensor.dtype in _AS_INTEGERS:
        dtype, kind = _AS_INTEGERS[tensor.dtype]
        return Storage(flat.view(dtype), kind)
    if tensor.is_complex():
        parts = torch.view_as_real(flat).view(-1)
        return Storage(parts, "complex" if op == "product" else "float")
    return Storage(flat, "float" if tensor.dtype in _FLOATS else "integer")


def bytes_of(tensor: Tensor) -> Storage:
    """For kernels that move without looking: in parts as wide as the elements."""
    flat = tensor.view(-1)
    if tensor.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return Storage(flat.view(_INTEGERS[flat.element_size()]), "integer")


def float_bits(x: float) -> int:
    """Of a float64: how kernels get numbers that must not be rounded to float32."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def check_contiguous(tensors: dict[str, Tensor], device: torch.device) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"{name} is not contiguous; pass {name}.contiguous()")
        if tensor.device != device:
            raise ValueError(f"{name} lies on {tensor.device}, not on {device}; move it there")
