"""One parameter of a unit: its part on this rank, and the whole one while there is one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack

from pycoll.parallel.fsdp.sharding import Sharding, chunk_rows, rows_of

# Set on parameters that were divided, for those that still hold one elsewhere.
OWNER_ATTRIBUTE = "_pycoll_sharded_by"


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """As a fresh tensor of that shape has them."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(eq=False)
class ShardedParameter:
    """A parameter of a unit.

    Attributes:
        name: as in ``named_parameters`` of the unit's module.
        places: modules that hold it and its name there; several if it is tied inside of the unit.
        sharded: its part, a DTensor; what optimizers and checkpoints see.
        whole: what the module computes with; its memory comes and goes.
        accumulated: whole gradients of passes that did not synchronise.
        used: it got a gradient since the last synchronisation.
        fresh: the reduced gradient of its part that is not yet its ``grad``.
        row_numel: elements of a row.
        part_numel: elements of a part with its padding; equal on all ranks.
        local_shape: of this rank's part.
    """

    name: str
    places: list[tuple[nn.Module, str]]
    shape: torch.Size
    dtype: torch.dtype
    sharding: Sharding
    sharded: nn.Parameter
    whole: nn.Parameter | None = None
    accumulated: Tensor | None = None
    used: bool = False
    fresh: Tensor | None = None
    row_numel: int = field(init=False)
    part_numel: int = field(init=False)
    local_shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.row_numel = math.prod(self.shape[1:])
        self.part_numel = chunk_rows(self.shape[0], self.sharding.size) * self.row_numel
        begin, end = rows_of(self.shape[0], self.sharding.size, self.sharding.rank)
        self.local_shape = (end - begin, *self.shape[1:])

    def as_part(self, padded: Tensor) -> Tensor:
        """`padded`, (part_numel,), without its padding and in shape."""
        numel = math.prod(self.local_shape)
        exact = padded if numel == padded.numel() else padded[:numel]
        return exact.view(self.local_shape)

    def as_dtensor(self, part: Tensor) -> DTensor:
        """This rank's part of a tensor that is laid out as the parameter, and of its dtype."""
        # Past DTensor.from_local, which takes 80 us to find out what is known here. The offset in storage is to be that
        # of the parameter's part, none (`with_storage`), whatever that of `part`.
        spec = self.sharded._spec  # type: ignore[attr-defined]
        result = DTensor(local_of(self.sharded), spec, requires_grad=False)
        result._local_tensor = part
        return result

    def hold(self, parameter: nn.Parameter) -> None:
        """Puts the part, or the whole parameter, where modules look for it."""
        for module, name in self.places:
            module._parameters[name] = parameter

    def held(self) -> Any:
        """What the first module holds."""
        module, name = self.places[0]
        return module._parameters[name]

    def take_gradient(self, dtype: torch.dtype) -> None:
        """Adds the whole parameter's gradient to what has been accumulated in `dtype`."""
        whole = self.whole
        if whole is None or whole.grad is None:
            return
        grad, whole.grad = whole.grad, None
        self.used = True
        if self.accumulated is None:
            self.accumulated = grad.to(dtype)
        else:
            self.accumulated += grad

    def padded_gradient(self, dtype: torch.dtype) -> Tensor:
        """The accumulated gradient, or zeros, as (size * part_numel,); it is given away."""
        grad, self.accumulated = self.accumulated, None
        total = self.sharding.size * self.part_numel
        if grad is None:
            return torch.zeros(total, dtype=dtype)
        flat = grad.reshape(-1)
        if flat.numel() == total:
            return flat
        padded = flat.new_zeros(total)
        padded[: flat.numel()].copy_(flat)
        return padded

    def add_to_grad(self) -> None:
        """The fresh gradient becomes the part's ``grad``, or is added to it."""
        fresh, self.fresh = self.fresh, None
        if fresh is None:
            return
        if self.sharded.grad is None:
            self.sharded.grad = self.as_dtensor(fresh)
        else:
            local_of(self.sharded.grad).add_(fresh)


def with_storage(part: Tensor) -> Tensor:
    """The same memory as a storage of its own, that begins where `part` does.

    A DTensor takes its offset in storage from its local tensor, and with one that is not zero torch can neither save it
    nor copy it; and saving a part of a buffer would write all of it.
    """
    if part.is_meta:
        return part
    # As bytes: not every dtype can go through DLPack.
    return from_dlpack(part.view(torch.uint8)).view(part.dtype)


def local_of(tensor: Any) -> Tensor:
    """The local tensor of a DTensor, as it is (no copy, no autograd)."""
    local: Tensor = tensor._local_tensor
    return local
