"""DataParallel: one process, several devices, each with a part of the batch; no device moves more than the others."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pycoll.parallel.local_group import LocalGroup

Device = int | str | torch.device


class DataParallel(nn.Module):
    """Splits a batch over devices, runs a copy of the module on each, and joins what they return.

    As ``torch.nn.DataParallel``; but weights go to the devices, and gradients back to the module, through a group whose
    ranks are the devices: each of N devices moves about twice the weights and gradients, where the first one would move
    N - 1 times as much if it dealt with each of the others. The first copy is the module itself, so that buffers that
    its forward updates (running statistics) are kept, of its part of the batch.

    Args:
        module: with parameters on the first device.
        device_ids: devices in order, one may be named several times: ``["cpu", "cpu"]`` runs two copies on two
            threads. None: one, that of the parameters; then the module is called as it is.
        output_device: where results are joined; None: the first device.
        dim: of tensors that are split and joined.

    Raises:
        ValueError: `device_ids` is empty, or holds a device that this build cannot move tensors of.
        RuntimeError: the module is not on the first device.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.module, self.dim = module, dim
        first = next((p.device for p in module.parameters()), torch.device("cpu"))
        if device_ids is None:
            device_ids = [first]
        if not device_ids:
            raise ValueError("device_ids is empty; name one device at least, or pass None")
        self.device_ids = [_device_of(device) for device in device_ids]
        self.output_device = (
            self.device_ids[0] if output_device is None else _device_of(output_device)
        )
        for device in (*self.device_ids, self.output_device):
            if device.type != "cpu":
                raise ValueError(
                    f"device_ids holds {device}, but this build of pycoll moves CPU tensors only"
                )
        self._groups: dict[int, LocalGroup] = {}

    def group(self, world_size: int | None = None) -> LocalGroup:
        """The group of the first `world_size` devices (None: all); made when first used."""
        number = len(self.device_ids) if world_size is None else world_size
        if number not in self._groups:
            self._groups[number] = LocalGroup(number)
        return self._groups[number]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Splits every tensor in the arguments along `dim`; everything else goes to all copies as it is."""
        self._check_device()
        if len(self.device_ids) == 1:
            return self.module(*inputs, **kwargs)
        parts = scatter((inputs, kwargs), len(self.device_ids), self.dim)
        if len(parts) == 1:
            return self.module(*parts[0][0], **parts[0][1])
        replicas = replicate(self.module, self.group(len(parts)))
        outputs = parallel_apply(replicas, parts)
        return gather(outputs, self.dim)

    def _check_device(self) -> None:
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.device != self.device_ids[0]:
                raise RuntimeError(
                    "module must have its parameters and buffers on device "
                    f"{self.device_ids[0]} (device_ids[0]) but found one of them on device: {tensor.device}"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": {}}


def _device_of(device: Device) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


# --- weights and gradients -------------------------------------------------------------------------


class _Replicate(torch.autograd.Function):
    """Parameters to every rank of a local group, their gradients back as sums in rank order."""

    @staticmethod
    def forward(ctx: Any, group: LocalGroup, *parameters: Tensor) -> tuple[Tensor, ...]:
        """P parameters to world_size × P tensors, those of a rank together."""
        ctx.set_materialize_grads(False)
        ctx.group, ctx.shapes = group, [(p.shape, p.dtype) for p in parameters]
        copies = _spread(group, parameters)
        first = [p.view_as(p) for p in parameters]
        return (*first, *(tensor for copy in copies[1:] for tensor in copy))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        number = len(ctx.shapes)
        of_ranks = [grads[begin : begin + number] for begin in range(0, len(grads), number)]
        results: list[Tensor | None] = [None] * number
        for indices in _by_dtype([dtype for _, dtype in ctx.shapes]):
            # What no copy has used has no gradient, as in the module alone.
            used = [i for i in indices if any(rank[i] is not None for rank in of_ranks)]
            if not used:
                continue
            flats = [
                torch.cat([_filled(rank[i], *ctx.shapes[i]).reshape(-1) for i in used])
                for rank in of_ranks
            ]
            total = ctx.group.collect(flats)
            for i, part in zip(used, _split(total, [ctx.shapes[i][0] for i in used]), strict=True):
                results[i] = part
        return (None, *results)


def _filled(grad: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if grad is None:
        return torch.zeros(shape, dtype=dtype)
    return grad.to_dense() if grad.is_sparse else grad


def _by_dtype(dtypes: Sequence[torch.dtype]) -> Iterator[list[int]]:
    for wanted in dict.fromkeys(dtypes):
        yield [i for i, dtype in enumerate(dtypes) if dtype == wanted]


def _split(flat: Tensor, shapes: Sequence[torch.Size]) -> Iterator[Tensor]:
    begin = 0
    for shape in shapes:
        yield flat[begin : begin + shape.numel()].view(shape)
        begin += shape.numel()


def _spread(group: LocalGroup, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Copies of the tensors for each rank; those of rank 0 are copies too."""
    copies: list[list[Any]] = [[None] * len(tensors) for _ in range(group.world_size)]
    for indices in _by_dtype([tensor.dtype for tensor in tensors]):
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in indices])
        for rank, received in enumerate(group.spread(flat)):
            parts = _split(received, [tensors[i].shape for i in indices])
            for i, part in zip(indices, parts, strict=True):
                copies[rank][i] = part
    return copies


def replicate(module: nn.Module, group: LocalGroup) -> list[nn.Module]:
    """A copy of the module for each rank of a local group; the first shares parameters and buffers with it.

    Gradients of the copies' parameters add up in the module's.
    """
    parameters = list(module.parameters())
    buffers = list(module.buffers())
    tensors: list[dict[int, Tensor]] = [{} for _ in range(group.world_size)]
    trainable = [p for p in parameters if p.requires_grad and torch.is_grad_enabled()]
    rest = [t for t in (*parameters, *buffers) if not any(t is p for p in trainable)]
    if trainable:
        copied = _Replicate.apply(group, *trainable)
        for position, tensor in enumerate(copied):
            rank, index = divmod(position, len(trainable))
            tensors[rank][id(trainable[index])] = tensor
    if rest:
        for rank, received in enumerate(_spread(group, rest)):
            for original, tensor in zip(rest, received, strict=True):
                tensors[rank][id(original)] = original if rank == 0 else tensor
    return [_copy_with(module, known) for known in tensors]


def _copy_with(module: nn.Module, tensors: Mapping[int, Tensor]) -> nn.Module:
    copies = {m: m._replicate_for_data_parallel() for m in module.modules()}
    for original, copied in copies.items():
        for key, child in original._modules.items():
            copied._modules[key] = None if child is None else copies[child]
        for key, parameter in original._parameters.items():
            if parameter is None:
                copied._parameters[key] = None
            else:
                # Not a leaf, so not a Parameter: a plain attribute.
                setattr(copied, key, tensors[id(parameter)])
        for key, buffer in original._buffers.items():
            copied._buffers[key] = None if buffer is None else tensors[id(buffer)]
    return copies[module]


# --- batches ---------------------------------------------------------------------------------------


def scatter(value: Any, number: int, dim: int) -> list[Any]:
    """The value in up to `number` parts: tensors split along `dim`, containers part by part, the rest repeated.

    A tensor shorter than `number` gives fewer parts; then there are as many parts as the longest tensor gives, and
    shorter ones raise.
    """
    sizes = {len(tensor.chunk(number, dim)) for tensor in _tensors_in(value)}
    if len(sizes) > 1:
        raise ValueError(
            f"tensors in the arguments split into {sorted(sizes)} parts along dim {dim}; give them equal sizes"
        )
    return _scatter(value, sizes.pop() if sizes else number, dim)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each)


def _scatter(value: Any, number: int, dim: int) -> list[Any]:
    if isinstance(value, Tensor):
        return list(value.chunk(number, dim))
    if isinstance(value, (list, tuple)):
        columns = [_scatter(each, number, dim) for each in value]
        return [_like(value, [column[part] for column in columns]) for part in range(number)]
    if isinstance(value, dict):
        rows = {key: _scatter(each, number, dim) for key, each in value.items()}
        return [
            type(value)((key, row[part]) for key, row in rows.items()) for part in range(number)
        ]
    return [value] * number


def _like(container: Any, items: list[Any]) -> Any:
    """A list or (named) tuple of the same type."""
    if hasattr(container, "_fields"):
        return type(container)(*items)
    return type(container)(items)


def gather(outputs: Sequence[Any], dim: int) -> Any:
    """The inverse of `scatter`; scalars become a vector.

    Raises:
        ValueError: the copies returned containers of different sizes.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if all(output.dim() == 0 for output in outputs):
            warnings.warn(
                "the copies returned scalars, which are gathered in a vector, one of each copy",
                stacklevel=2,
            )
            return torch.stack(tuple(outputs))
        return torch.cat(tuple(outputs), dim)
    if first is None:
        return None
    if isinstance(first, dict):
        if any(output.keys() != first.keys() for output in outputs):
            raise ValueError("the copies returned dicts with different keys")
        return type(first)((key, gather([o[key] for o in outputs], dim)) for key in first)
    if isinstance(first, (list, tuple)):
        return _like(first, [gather(column, dim) for column in zip(*outputs, strict=True)])
    return list(outputs)


def parallel_apply(replicas: Sequence[nn.Module], parts: Sequence[Any]) -> list[Any]:
    """Runs every copy on its part, each on a thread of its own, with this thread's grad mode and autocast.

    Raises:
        Exception: what the first of the copies that failed has raised, once all have ended.
    """
    grad = torch.is_grad_enabled()
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    outputs: list[Any] = [None] * len(parts)
    failures: dict[int, BaseException] = {}

    def run(number: int) -> None:
        (args, kwargs) = parts[number]
        try:
            with (
                torch.set_grad_enabled(grad),
                torch.autocast("cpu", enabled=autocast[0], dtype=autocast[1]),
            ):
                outputs[number] = replicas[number](*args, **kwargs)
        except BaseException as error:
            failures[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, len(parts))]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[min(failures)]
    return outputs
