"""Guard bytes: tensors inside a larger buffer, so that a write next to them can be seen.

A guarded tensor is an ordinary tensor; everything needed to check it is in its storage. The bytes
of the storage that no element of the tensor covers hold a pattern that depends on their position:
what lies before and after the tensor, and the gaps between its elements if it has strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# On each side of the tensor. A multiple of a cache line: an offset of 0 is an aligned tensor.
GUARD_NBYTES = 256


def guarded(
    values: Tensor, *, strides: Sequence[int] | None = None, offset_bytes: int = 0
) -> Tensor:
    """A copy of `values`, on their device, inside a larger buffer whose other bytes are guards.

    strides: in elements, one per dim; contiguous unless given. Equal positions (a stride of 0)
        are allowed where `values` agrees with itself there.
    offset_bytes: where the tensor starts behind the guard, a multiple of the item size; the guard
        itself is a multiple of 64 bytes.
    """
    itemsize = values.element_size()
    if offset_bytes < 0 or offset_bytes % itemsize:
        raise ValueError(
            f"offset_bytes must be a multiple of the item size {itemsize}; got {offset_bytes}"
        )
    if strides is None:
        strides = torch.empty(values.shape, device="meta").stride()
    reach = _reach(values.shape, strides)
    nbytes = GUARD_NBYTES + offset_bytes + reach * itemsize + GUARD_NBYTES
    nbytes += -nbytes % itemsize
    buffer = _pattern(nbytes).to(values.device)
    start = (GUARD_NBYTES + offset_bytes) // itemsize
    view = torch.as_strided(buffer.view(values.dtype), values.shape, tuple(strides), start)
    target, source = view, values
    for dim in (dim for dim, stride in enumerate(strides) if stride == 0 and view.shape[dim]):
        # torch refuses to write one place twice.
        target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    return view


def check_guards(*tensors: Tensor) -> None:
    """Raise AssertionError if a byte outside the elements of `tensors` has changed.

    The tensors were made by `guarded`, or are views that together cover one such tensor.
    """
    storage = tensors[0].untyped_storage()
    nbytes = storage.nbytes()
    content = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    content = content.set_(storage, 0, (nbytes,), (1,)).cpu()
    outside = torch.ones(nbytes, dtype=torch.bool)
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != storage.data_ptr():
            raise ValueError("tensors of one call must share their storage")
        itemsize = tensor.element_size()
        rows = outside[: nbytes // itemsize * itemsize].view(-1, itemsize)
        strides = [stride * itemsize for stride in tensor.stride()]
        shape = (*tensor.shape, itemsize)
        start = tensor.storage_offset() * itemsize
        torch.as_strided(rows, shape, (*strides, 1), start).fill_(False)
    changed = torch.nonzero(outside.logical_and_(content != _pattern(nbytes))).flatten()
    if changed.numel():
        first, itemsize = int(changed[0]), tensors[0].element_size()
        relative = first - tensors[0].storage_offset() * itemsize
        raise AssertionError(
            f"{changed.numel()} bytes outside the tensor were written; the first is byte "
            f"{relative} counted from its first element (tensor of shape "
            f"{tuple(tensors[0].shape)}, strides {tensors[0].stride()}, {itemsize} bytes each)"
        )


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last position, both included."""
    if any(length == 0 for length in shape):
        return 0
    return 1 + sum((length - 1) * s for length, s in zip(shape, strides, strict=True))


def _pattern(nbytes: int) -> Tensor:
    # The period is odd and prime, so that a shifted copy of these bytes differs as well.
    period = 251
    once = (torch.arange(period) * 31 % period + 3).to(torch.uint8)
    return once.repeat(-(-nbytes // period))[:nbytes].clone()
