"""Buckets and block-wise quantisation, as functions on tensors.

A *bucket* is many tensors, one after another, in one flat tensor. *Codes* are elements of 8 bits under a
scale that a block of them shares; docs/quantisation.md states formulas, rounding and error bounds.

Each function is an operator of ``torch.library`` in the namespace ``pycoll`` (``torch.ops.pycoll.flatten`` and so
on): it works under ``torch.compile``, and has a derivative where that makes sense. One call takes thousands of
tensors, of any strides, on one thread; they are all on the CPU or all on one CUDA device, where kernels run in the
current stream (docs/cuda_path.md). Arguments are checked before anything is written; what is wrong raises
``ValueError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pycoll import _core, _cuda

__all__ = [
    "dequantise_blocks",
    "flatten",
    "flatten_into",
    "flatten_quantised",
    "quantise_blocks",
    "unflatten",
    "unflatten_into",
    "unflatten_quantised_into",
]

_cuda.install(_core.load())
_ops: Any = torch.ops.pycoll

Tensors = Sequence[Tensor | None]


# --- buckets ---------------------------------------------------------------------------------------


def flatten(
    tensors: Tensors,
    *,
    numels: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """A new bucket: ``scale`` times the elements of all `tensors`, in order, cast to `dtype`.

    Args:
        tensors: of any shape and strides. None stands for a tensor that is absent, such as a missing
            gradient: zeros in its place.
        numels: elements of each tensor; needed if one is None.
        dtype: of the bucket; None: of the first tensor. float32, float16, bfloat16, float8_e4m3fn and
            float8_e5m2 are cast to one another, with rounding to nearest even (float8 saturates); any other
            dtype only to itself.
        scale: multiplies in float32 (float64 for float64). Only for floats.
        device: of the bucket, if all tensors are None; None: the CPU.

    Returns:
        A tensor of one dimension. Differentiable with respect to `tensors`.

    Raises:
        ValueError: lengths, numbers of elements or dtypes do not fit.
    """
    present, begins, numel = _places(tensors, numels)
    if dtype is None:
        if not present:
            raise ValueError("tensors has no tensor and dtype is not given; pass dtype")
        dtype = present[0].dtype
    if not present:
        return torch.zeros(numel, dtype=dtype, device=device)
    bucket: Tensor = _ops.flatten(present, begins, numel, dtype, scale)
    return bucket


def flatten_into(
    bucket: Tensor,
    tensors: Tensors,
    *,
    numels: Sequence[int] | None = None,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Writes ``scale`` times the elements of all `tensors`, in order, to `bucket`.

    Args:
        bucket: contiguous, with as many elements as all tensors together.
        tensors, numels, scale: as of :func:`flatten`.
        accumulate: add to what the bucket holds; absent tensors then leave it as it is. The sum is
            formed in float32 (float64 for float64) and rounded once.

    Raises:
        ValueError: as :func:`flatten`; or a tensor shares memory with the bucket, unless it is its own
            part of it and is only moved.
    """
    present, begins, numel = _places(tensors, numels)
    _check_numel("bucket", bucket, numel)
    _ops.flatten_into(bucket, present, begins, scale, accumulate)


def unflatten(
    bucket: Tensor,
    shapes: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
) -> list[Tensor]:
    """New tensors of the given `shapes`: ``scale`` times the elements of `bucket`, in order.

    Args:
        bucket: contiguous, with as many elements as all shapes together.
        dtype: of the tensors; None: of the bucket. Casts as in :func:`flatten`.

    Returns:
        A tensor for each shape. Differentiable with respect to `bucket`.

    Raises:
        ValueError: the numbers of elements or the dtypes do not fit.
    """
    numels = [torch.Size(shape).numel() for shape in shapes]
    pieces = _ops.unflatten(bucket, numels, bucket.dtype if dtype is None else dtype, scale)
    return [piece.view(shape) for piece, shape in zip(pieces, map(tuple, shapes), strict=True)]


def unflatten_into(
    bucket: Tensor,
    tensors: Tensors,
    *,
    numels: Sequence[int] | None = None,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Writes ``scale`` times the elements of `bucket`, in order, to `tensors`.

    Args:
        bucket: contiguous, with as many elements as all tensors together.
        tensors: of any shape and strides; the part of one that is None is left out.
        numels: elements of each tensor; needed if one is None.
        accumulate: add to what the tensors hold, in float32, rounded once.

    Raises:
        ValueError: the numbers of elements or dtypes do not fit, or tensors share memory.
    """
    present, begins, numel = _places(tensors, numels)
    _check_numel("bucket", bucket, numel)
    _ops.unflatten_into(bucket, present, begins, scale, accumulate)


# --- quantisation ----------------------------------------------------------------------------------


def quantise_blocks(
    tensor: Tensor, block: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits, with one float32 scale for each `block` elements in logical order.

    Args:
        tensor: float32, float16, bfloat16 or float8, of any shape and strides.
        block: elements that share a scale; the last block may be shorter. ``tensor.numel()`` gives one
            scale for all ("amax scaling").
        dtype: of the codes: float8_e4m3fn, float8_e5m2 or int8.

    Returns:
        Codes, of the shape of `tensor`, and scales, ``ceil(numel / block)`` of them. Neither carries a gradient. A
        block with a NaN or an infinity has the scale NaN.

    Raises:
        ValueError: a dtype is none of the above, or `block` is not positive.
    """
    codes, scales = _ops.quantise_blocks(tensor, block, dtype)
    return codes, scales


def dequantise_blocks(
    codes: Tensor, scales: Tensor, block: int = 128, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Codes times the scale of their block.

    Args:
        codes, scales, block: as :func:`quantise_blocks` gave and got them.
        dtype: of the result; the product is formed in float32.

    Returns:
        A tensor of the shape of `codes`. Differentiable with respect to `scales`.

    Raises:
        ValueError: dtypes or the number of scales do not fit.
    """
    output: Tensor = _ops.dequantise_blocks(codes, scales, block, dtype)
    return output


def flatten_quantised(
    tensors: Tensors,
    *,
    numels: Sequence[int] | None = None,
    block: int | None = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: float = 1.0,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`flatten`, then :func:`quantise_blocks`, in one pass.

    Args:
        block: elements of the bucket that share a scale, across tensors; None: one scale for each
            tensor, absent and empty ones included.
        device: of codes and scales, if all tensors are None; None: the CPU.

    Returns:
        Codes (one for each element of the bucket) and scales. Neither carries a gradient.
    """
    present, begins, numel = _places(tensors, numels)
    if len(present) < len(tensors) and (block is None or not present):
        where = present[0].device if present else device
        present, begins, numel = _places(_with_zeros(tensors, numels, where), None)
    codes, scales = _ops.flatten_quantised(present, begins, numel, _block(block), dtype, scale)
    return codes, scales


def unflatten_quantised_into(
    codes: Tensor,
    scales: Tensor,
    tensors: Tensors,
    *,
    numels: Sequence[int] | None = None,
    block: int | None = 128,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """:func:`dequantise_blocks`, then :func:`unflatten_into`, in one pass.

    Args:
        codes, scales, block: as :func:`flatten_quantised` gave and got them.
        tensors, numels, scale, accumulate: as of :func:`unflatten_into`.
    """
    present, begins, numel = _places(tensors, numels)
    if len(present) < len(tensors) and block is None:
        present, begins, numel = _places(_with_zeros(tensors, numels, codes.device), None)
    _check_numel("codes", codes, numel)
    _ops.unflatten_quantised_into(codes, scales, present, begins, _block(block), scale, accumulate)


def _places(tensors: Tensors, numels: Sequence[int] | None) -> tuple[list[Tensor], list[int], int]:
    """The tensors that are there, where each begins in the bucket, and the bucket's elements."""
    if numels is not None and len(numels) != len(tensors):
        raise ValueError(
            f"tensors has {len(tensors)} entries and numels {len(numels)}; "
            "give one number for each tensor"
        )
    if numels is None and all(tensor is not None for tensor in tensors):
        # The usual case, for thousands of tensors.
        present = [tensor for tensor in tensors if tensor is not None]
        *begins, end = accumulate([tensor.numel() for tensor in present], initial=0)
        return present, begins, end
    present, begins, end = [], [], 0
    for i, tensor in enumerate(tensors):
        if tensor is not None:
            present.append(tensor)
            begins.append(end)
            if numels is not None and numels[i] != tensor.numel():
                raise ValueError(
                    f"tensors[{i}] has {tensor.numel()} elements, but numels[{i}] is {numels[i]}; "
                    "make them equal"
                )
            end += tensor.numel()
        elif numels is None:
            raise ValueError(
                f"tensors[{i}] is None and numels is not given; "
                "pass numels, the number of elements of each tensor"
            )
        else:
            end += numels[i]
    return present, begins, end


def _with_zeros(
    tensors: Tensors, numels: Sequence[int] | None, device: torch.device | str | None
) -> list[Tensor]:
    """Zeros in the places of absent tensors, where these have to be counted."""
    assert numels is not None  # or _places would have refused
    return [
        torch.zeros(numel, device=device) if tensor is None else tensor
        for tensor, numel in zip(tensors, numels, strict=True)
    ]


def _check_numel(argument: str, flat: Tensor, numel: int) -> None:
    if flat.numel() != numel:
        raise ValueError(
            f"{argument} has {flat.numel()} elements, but the tensors have {numel}; make them equal"
        )


def _block(block: int | None) -> int:
    if block is not None and block < 1:
        raise ValueError(f"block is {block}; give a positive number of elements, or None")
    return block or 0  # the operators' way to say: one scale a tensor


# --- what torch.compile and autograd have to know --------------------------------------------------


def _num_scales(num_tensors: int, numel: int, block: int) -> int:
    return num_tensors if block == 0 else (numel + block - 1) // block


@torch.library.register_fake("pycoll::flatten")
def _(
    tensors: list[Tensor],
    begins: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    scale: float,
) -> Tensor:
    return tensors[0].new_empty(numel, dtype=dtype)


@torch.library.register_fake("pycoll::unflatten")
def _(bucket: Tensor, numels: Sequence[int], dtype: torch.dtype, scale: float) -> list[Tensor]:
    return [bucket.new_empty(numel, dtype=dtype) for numel in numels]


def _writes_only(*args: Any, **kwargs: Any) -> None:
    """Operators that return nothing make nothing that has a shape."""


for _name in ("flatten_into", "unflatten_into", "unflatten_quantised_into"):
    torch.library.register_fake(f"pycoll::{_name}", _writes_only)


@torch.library.register_fake("pycoll::flatten_quantised")
def _(
    tensors: list[Tensor],
    begins: Sequence[int],
    numel: int,
    block: int,
    dtype: torch.dtype,
    scale: float,
) -> tuple[Tensor, Tensor]:
    num_scales = _num_scales(len(tensors), numel, block)
    return (
        tensors[0].new_empty(numel, dtype=dtype),
        tensors[0].new_empty(num_scales, dtype=torch.float32),
    )


@torch.library.register_fake("pycoll::quantise_blocks")
def _(tensor: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (
        tensor.new_empty(tensor.shape, dtype=dtype),
        tensor.new_empty(_num_scales(1, tensor.numel(), block), dtype=torch.float32),
    )


@torch.library.register_fake("pycoll::dequantise_blocks")
def _(codes: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


def _remember_flatten(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, ctx.begins, ctx.numel, _, ctx.scale = inputs
    ctx.like = [(tensor.shape, tensor.dtype) for tensor in tensors]


def _flatten_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The bucket's gradient, unflattened; parts that belong to no tensor are dropped."""
    numels, end = [], 0
    for begin, (shape, _) in zip(ctx.begins, ctx.like, strict=True):
        numels += [begin - end, shape.numel()]
        end = begin + shape.numel()
    numels.append(ctx.numel - end)
    dtypes = {dtype for _, dtype in ctx.like}
    # Tensors of several dtypes: through float32, which holds all that are cast to one another.
    common = dtypes.pop() if len(dtypes) == 1 else torch.float32
    pieces = _ops.unflatten(grad.contiguous(), numels, common, ctx.scale)
    grads = [pieces[2 * i + 1].view(shape).to(dtype) for i, (shape, dtype) in enumerate(ctx.like)]
    return grads, None, None, None, None


def _remember_unflatten(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    bucket, ctx.numels, _, ctx.scale = inputs
    ctx.shape, ctx.dtype = bucket.shape, bucket.dtype


def _unflatten_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    present, begins, numel = _places(grads, ctx.numels)
    if not present:
        return None, None, None, None
    grad = _ops.flatten(present, begins, numel, ctx.dtype, ctx.scale)
    return grad.view(ctx.shape), None, None, None


def _remember_codes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    codes, scales, ctx.block, _ = inputs
    ctx.num_scales = scales.shape
    ctx.save_for_backward(codes)


def _dequantise_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (codes,) = ctx.saved_tensors
    products = (grad.float() * codes.float()).flatten()
    padded = torch.nn.functional.pad(products, (0, -products.numel() % ctx.block))
    return None, padded.view(-1, ctx.block).sum(1).view(ctx.num_scales), None, None


torch.library.register_autograd(
    "pycoll::flatten", _flatten_backward, setup_context=_remember_flatten
)
torch.library.register_autograd(
    "pycoll::unflatten", _unflatten_backward, setup_context=_remember_unflatten
)
torch.library.register_autograd(
    "pycoll::dequantise_blocks", _dequantise_backward, setup_context=_remember_codes
)
