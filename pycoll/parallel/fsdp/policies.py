"""What a unit is told: dtypes, where parts are kept, and what travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import fsdp as torch_fsdp


def _check_floating(owner: str, name: str, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{owner}.{name} is a {type(dtype).__name__}; pass a torch.dtype or None")
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            f"{owner}.{name} is {dtype}; give float16, bfloat16, float32, float64 or None"
        )


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit. Parts, their gradients and the optimizer keep the parameters' own (the master weights).

    Attributes:
        param_dtype: of whole floating-point parameters, and so of what a unit computes; None: their own.
        reduce_dtype: of gradients when they are reduced; None: `param_dtype`.
        output_dtype: of the floating-point outputs of the module; None: as they come.
        cast_forward_inputs: whether floating-point inputs are cast to `param_dtype`.

    Raises:
        TypeError, ValueError: a dtype is not a floating-point dtype of at least 16 bits.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            _check_floating("MixedPrecisionPolicy", name, getattr(self, name))


def as_mixed_precision(name: str, policy: Any) -> MixedPrecisionPolicy:
    """torch's policies say the same; `name` is the argument's.

    Raises:
        TypeError: it is no policy.
        ValueError: it asks for something that a `MixedPrecisionPolicy` cannot say.
    """
    if policy is None:
        return MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, torch_fsdp.MixedPrecisionPolicy):
        return MixedPrecisionPolicy(
            policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs
        )
    if not isinstance(policy, torch_fsdp.MixedPrecision):
        raise TypeError(f"{name} is a {type(policy).__name__}; pass a pycoll.MixedPrecisionPolicy")
    for field, value in (("buffer_dtype", None), ("keep_low_precision_grads", False)):
        if getattr(policy, field) != value:
            raise ValueError(
                f"{name}.{field} is {getattr(policy, field)}; pycoll leaves buffers as they are and keeps gradients "
                f"in the parameters' dtype: set it to {value}, and cast buffers with Module.to"
            )
    casts = policy.cast_forward_inputs or policy.cast_root_forward_inputs
    return MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, None, casts)


@dataclass(frozen=True)
class OffloadPolicy:
    """Parts stay on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Parts, their gradients and so the optimizer's state lie in CPU memory. There they are already where the CPU
    computes, so that nothing changes then.

    Attributes:
        pin_memory: of parts, for copies to a device; without meaning where the CPU computes.
    """

    pin_memory: bool = True


def check_offload(name: str, policy: Any) -> None:
    """Where the CPU computes there is nothing to do, whatever the policy says.

    Raises:
        TypeError: it is none of pycoll's or torch's policies.
    """
    known = (OffloadPolicy, torch_fsdp.OffloadPolicy, torch_fsdp.CPUOffload)
    if policy is not None and not isinstance(policy, known):
        raise TypeError(f"{name} is a {type(policy).__name__}; pass a pycoll.OffloadPolicy")


_WIRE_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.bfloat16,
    torch.float16,
)


@dataclass(frozen=True)
class WirePolicy:
    """What elements are on their way between ranks; see `pycoll.all_reduce`.

    Attributes:
        gather: of parts; None: `param_dtype`. Only for whole parameters of float32, bfloat16 or float16.
        reduce: of gradients; None: `reduce_dtype`.
        block: elements that share a scale, 1 to 1024.

    Raises:
        ValueError: a dtype or `block` is none of those.
    """

    gather: torch.dtype | None = None
    reduce: torch.dtype | None = None
    block: int = 128

    def __post_init__(self) -> None:
        for name in ("gather", "reduce"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in _WIRE_DTYPES:
                known = ", ".join(str(each).removeprefix("torch.") for each in _WIRE_DTYPES)
                raise ValueError(f"WirePolicy.{name} is {dtype}; give one of {known}, or None")
        if not 1 <= self.block <= 1024:
            raise ValueError(f"WirePolicy.block must be 1 to 1024, got {self.block}")
