"""Norms of gradients of which each rank has parts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from pycoll import collectives


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients so that the norm of all of them together is at most `max_norm`. Collective.

    Every element counts once, whoever has it: parts are added up over the ranks that divide a parameter; of replicas
    the largest norm counts (they are equal, unless something is wrong); parameters that are not divided count as they
    are. The norm is formed in float64 and is the same on all ranks.

    Args:
        parameters: of sharded modules, plain ones, or both; the same on all ranks. A rank may lack gradients.
        max_norm: not negative.
        norm_type: p of the p-norm, above 0; ``inf`` for the largest absolute value.
        error_if_nonfinite: raise if the norm is infinite or NaN, which all ranks see.

    Returns:
        the norm before scaling, 0-dim float32 (float64 if a gradient is).

    Raises:
        TypeError: `max_norm` or `norm_type` is no number, or a parameter no tensor.
        ValueError: `max_norm` or `norm_type` is out of its range, or a gradient is a partial sum.
        RuntimeError: the norm is not finite and `error_if_nonfinite`.
    """
    max_norm, norm_type = _number("max_norm", max_norm), _number("norm_type", norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must not be negative, got {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, got {norm_type}")
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for p in chosen:
        held = by_groups.setdefault(_groups_of(p), [])
        if p.grad is not None:
            held.append(_local(p.grad))
    is_inf = math.isinf(norm_type)
    total = torch.zeros((), dtype=torch.float64)
    for groups, grads in by_groups.items():
        part = torch.zeros(1, dtype=torch.float64)
        for grad in grads:
            if grad.numel():
                _add(part, grad, norm_type)
        for group, divides in groups:
            collectives.all_reduce(part, "sum" if divides and not is_inf else "max", group)
        total = torch.maximum(total, part[0]) if is_inf else total + part[0]
    norm = total if is_inf else total ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}; find the parameter with "
            "torch.isfinite, or pass error_if_nonfinite=False to clip anyway"
        )
    # torch divides by the norm and a little, so that no gradient is enlarged by rounding.
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    grads = [grad for held in by_groups.values() for grad in held]
    for grad in grads:
        grad.mul_(scale.to(grad.real.dtype if grad.is_complex() else grad.dtype))
    is_double = any(grad.dtype in (torch.float64, torch.complex128) for grad in grads)
    return norm if is_double else norm.to(torch.float32)


def _number(name: str, value: Any) -> float:
    """As torch's function reads it: "inf" will do."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; pass a number") from None


def _local(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.coalesce().values() if tensor.is_sparse else tensor
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError("a gradient is a partial sum; redistribute it before clipping")
    local: Tensor = tensor._local_tensor
    return local


def _groups_of(parameter: Tensor) -> tuple[tuple[Any, bool], ...]:
    """Of the dims of its mesh, and whether it is divided there, not replicated. The same on all ranks, also where some
    lack gradients.
    """
    if not isinstance(parameter, Tensor):
        raise TypeError(f"parameters has a {type(parameter).__name__}; pass model.parameters()")
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    divided = [isinstance(placement, Shard) for placement in parameter.placements]
    # Sums first: replicas hold sums of their own.
    dims = sorted(range(len(divided)), key=lambda dim: not divided[dim])
    return tuple((mesh.get_group(dim), divided[dim]) for dim in dims)


def _add(part: Tensor, grad: Tensor, norm_type: float) -> None:
    """Into `part`, (1,): the p-th powers, or the largest absolute value (NaN stays)."""
    if math.isinf(norm_type):
        largest = torch.linalg.vector_norm(grad, math.inf).to(torch.float64)
        part.copy_(torch.maximum(part, largest))
    else:
        part += torch.linalg.vector_norm(grad, norm_type, dtype=_wide(grad)).real ** norm_type


def _wide(grad: Tensor) -> torch.dtype:
    return torch.complex128 if grad.is_complex() else torch.float64
