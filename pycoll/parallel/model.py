"""What wrappers look for in models and in what these return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested sequences, mappings and dataclasses, and in attributes of other objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from tensors_in(getattr(value, one.name))
    elif (
        hasattr(value, "__dict__")
        and not isinstance(value, (nn.Module, type))
        and not callable(value)
    ):
        for each in vars(value).values():
            if isinstance(each, (Tensor, list, tuple, Mapping)):
                yield from tensors_in(each)


def with_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`value` with ``fn(tensor)`` in place of each tensor in nested sequences and mappings."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        return type(value)((key, with_tensors(each, fn)) for key, each in value.items())  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_tensors(each, fn) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(each, fn) for each in value)
    return value


def without_shards(module: nn.Module) -> nn.Module:
    """The module itself.

    Raises:
        ValueError: a parameter is a DTensor.
    """
    for name, p in module.named_parameters():
        if isinstance(p, DTensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor with {p.placements}, and DistributedDataParallel wants whole "
                "parameters on every rank; to replicate a sharded model call fully_shard with a mesh of "
                "(replicate, shard)"
            )
    return module


def step_in_backward(bucket: Any) -> None:
    for p in bucket.parameters:
        if p.grad is None:
            continue
        optimizers = getattr(p, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            p.grad = None


def sparse_parameters(module: nn.Module) -> set[int]:
    """Ids of the parameters that get sparse gradients."""
    return {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
    }
