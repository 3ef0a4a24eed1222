"""DistributedDataParallel in mixed precision: a model computes with copies of its parameters in another dtype.

Parameters stay what they are, in full precision. A forward pass casts them, as an operation that autograd sees, and
the model's modules hold the copies while it runs; so gradients come back cast to the parameters' dtype, wherever and
however often a copy is used. A backward pass puts copies in place as well, as checkpoints run parts of the forward
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from pycoll.parallel.model import with_tensors

# Autograd runs what was recorded last first. A cast is recorded before all that uses it, but a gradient should reach
# its parameter at once: reductions overlap with the rest of the backward pass.
_FIRST = (1 << 64) - 2


@dataclass(frozen=True)
class Precision:
    """What torch's ``_MixedPrecision`` says; nothing, of None. None: nothing is cast.

    Attributes:
        param_dtype: of floating-point parameters and inputs in the forward and backward pass.
        reduce_dtype: of gradients on their way; None: `param_dtype`.
        buffer_dtype: of floating-point buffers, from construction on.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None

    @classmethod
    def of(cls, config: Any) -> Precision:
        """
        Raises:
            TypeError: `config` has not the attributes of ``torch.nn.parallel.distributed._MixedPrecision``.
            ValueError: one of them is not a floating-point dtype of at least 16 bits.
        """
        if config is None:
            return cls(None, None, None)
        values = []
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            if not hasattr(config, name):
                raise TypeError(
                    f"mixed_precision is a {type(config).__name__} without {name}; "
                    "pass a torch.nn.parallel.distributed._MixedPrecision"
                )
            dtype = getattr(config, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2
            ):
                raise ValueError(
                    f"mixed_precision.{name} is {dtype}; give float16, bfloat16, float32, float64 or None"
                )
            values.append(dtype)
        param_dtype, reduce_dtype, buffer_dtype = values
        return cls(param_dtype, reduce_dtype or param_dtype, buffer_dtype)


class ParameterCasts:
    """Copies of a model's parameters in `dtype`, and the places where they are held while it runs.

    Args:
        ignored: names of parameters that are left alone.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, ignored: frozenset[str]) -> None:
        self.dtype = dtype
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for prefix, owner in module.named_modules(remove_duplicate=True):
            for name, p in owner._parameters.items():
                full = f"{prefix}.{name}" if prefix else name
                if p is None or full in ignored or not p.is_floating_point() or p.dtype == dtype:
                    continue
                self._places.append((owner._parameters, name, p))
        # For parts of the forward that a backward pass runs again.
        self._latest: dict[int, Tensor] | None = None
        self._depth = 0

    def _cast(self) -> dict[int, Tensor]:
        casts: dict[int, Tensor] = {}
        for _, _, p in self._places:
            if id(p) not in casts:
                cast = p.to(self.dtype)
                if cast.grad_fn is not None:
                    cast.grad_fn._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]
                casts[id(p)] = cast
        return casts

    def _put(self, casts: Mapping[int, Tensor]) -> None:
        for held, name, p in self._places:
            held[name] = casts[id(p)]

    def _restore(self) -> None:
        for held, name, p in self._places:
            held[name] = p

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The model computes with fresh copies inside."""
        self._enter()
        try:
            yield
        finally:
            self._restore()

    @_disable_dynamo
    def _enter(self) -> None:
        casts = self._cast()
        if torch.is_grad_enabled():
            self._latest = casts
        self._put(casts)

    def begin_backward(self) -> None:
        """Until `end_backward` the model holds copies, those of the last forward pass if they are still there."""
        if self._latest is None:
            with torch.enable_grad():
                self._latest = self._cast()
        self._put(self._latest)

    def end_backward(self) -> None:
        self._restore()
        self._latest = None

    def inputs(self, value: Any) -> Any:
        """`value` with the floating-point tensors in nested sequences and mappings cast."""
        return with_tensors(value, lambda x: x.to(self.dtype) if x.is_floating_point() else x)


def cast_buffers(named: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None) -> None:
    """Casts floating-point buffers where they are; None: leaves them."""
    if dtype is None:
        return
    for _, buffer in named:
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
