"""Gradients of one rank into a bucket, and their means out of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from pycoll.bucket import Bucket


@torch.no_grad()
def fill(
    bucket: Bucket,
    used: bytes,
    copied: bytes | None,
    saved: dict[int, Tensor],
    gradient_as_bucket_view: bool,
) -> None:
    """Copies gradients into the bucket, zeros where there are none.

    Args:
        bucket: sparse ones are left alone.
        used: not 0 for parameters with something new in their gradient.
        copied: not 0 for parameters whose gradients are in the bucket already; None: none is.
        saved: takes the gradients that lie in the bucket without anything new: if no rank has anything new for them,
            they are to stay bit for bit.
        gradient_as_bucket_view: make the views the parameters' gradients.

    Raises:
        RuntimeError: a gradient is not dense.
    """
    if bucket.sparse:
        return
    sources, targets, absent = [], [], []
    grads = [p.grad for p in bucket.parameters]
    for index, grad, view in zip(bucket.members, grads, bucket.views, strict=True):
        if copied is not None and copied[index]:
            continue
        if grad is None:
            absent.append(view)
        elif grad is not view:
            sources.append(grad)
            targets.append(view)
        elif not used[index]:
            saved[index] = view.clone()
    if absent:
        torch._foreach_zero_(absent)
    if sources:
        try:
            torch._foreach_copy_(targets, sources)
        except RuntimeError:
            _check_layouts(bucket)
            raise
    if gradient_as_bucket_view:
        for p, grad, view in zip(bucket.parameters, grads, bucket.views, strict=True):
            # One that has a graph (create_graph=True) stays what it is, and gets its mean by a copy.
            if grad is not None and grad is not view and not grad.requires_grad:
                p.grad = view


def _check_layouts(bucket: Bucket) -> None:
    for name, p in zip(bucket.names, bucket.parameters, strict=True):
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {name!r} is {p.grad.layout}, but no Embedding(sparse=True) or "
                "EmbeddingBag(sparse=True) of the model holds this parameter; make its gradient dense"
            )


@torch.no_grad()
def copy_out(
    bucket: Bucket,
    untouched: frozenset[int],
    saved: Mapping[int, Tensor],
    gradient_as_bucket_view: bool,
) -> None:
    """Gives the bucket's means to the parameters.

    Args:
        bucket: a dense one.
        untouched: indices of parameters whose gradients stay as they were before `fill`, None included.
        saved, gradient_as_bucket_view: as in `fill`.
    """
    sources, targets = [], []
    for index, p, view in zip(bucket.members, bucket.parameters, bucket.views, strict=True):
        grad = p.grad
        if index in untouched:
            with suppress(KeyError):
                view.copy_(saved[index])
        elif grad is None:
            p.grad = view if gradient_as_bucket_view else view.to(p.dtype, copy=True)
        elif grad is not view:
            sources.append(view)
            targets.append(grad)
    if sources:
        torch._foreach_copy_(targets, sources)


@torch.no_grad()
def not_finite(bucket: Bucket) -> list[str]:
    """Names of the parameters in whose gradients there is an infinity or a NaN."""
    if bucket.sparse:
        grad = bucket.parameters[0].grad
        values = [] if grad is None else [grad.coalesce().values() if grad.is_sparse else grad]
        return [bucket.names[0] for each in values if not bool(torch.isfinite(each).all())]
    named = zip(bucket.names, bucket.views, strict=True)
    return [name for name, view in named if not bool(torch.isfinite(view).all())]
