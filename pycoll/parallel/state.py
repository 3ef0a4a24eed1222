"""Parameters and buffers of a model from one rank to all others, whatever their dtypes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pycoll import collectives
from pycoll.parallel.agreement import Group

# Tensors of a device are sent together up to so many bytes; a larger one goes alone.
_CHUNK_BYTES = 16 << 20


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], src: int, group: Group) -> None:
    """Collective. The tensors of rank `src` of the group become those of all ranks, bit for bit."""
    for chunk in _chunks(tensors):
        for tensor, received in _broadcast_chunk(chunk, src, group):
            tensor.copy_(received)


def places_of_buffers(module: nn.Module, ignored: Collection[str]) -> list[tuple[nn.Module, str]]:
    """Where the buffers of a model are kept: a layer and a name in it, each buffer once.

    Places rather than tensors, as a program may put another tensor there; and found once, since walking through
    a model takes longer than sending its buffers.
    """
    places, seen = [], set()
    for prefix, layer in module.named_modules():
        for name, buffer in layer._buffers.items():
            full_name = f"{prefix}.{name}" if prefix else name
            if buffer is not None and id(buffer) not in seen and full_name not in ignored:
                seen.add(id(buffer))
                places.append((layer, name))
    return places


@torch.no_grad()
def broadcast_buffers(places: Iterable[tuple[nn.Module, str]], src: int, group: Group) -> None:
    """Collective. As `broadcast_tensors`, between two forward passes that one backward pass may follow.

    Running statistics are replaced behind autograd's back, as normalisation itself does. Any other buffer that
    changes counts as changed: if a backward pass still to come needs its old value, autograd raises there.
    """
    buffers, statistics = [], set()
    for layer, name in places:
        buffer = layer._buffers[name]
        if buffer is None:
            raise RuntimeError(
                f"buffer {name!r} of {type(layer).__name__} has become None; wrap the model again"
            )
        buffers.append(buffer)
        if isinstance(layer, _NormBase):
            statistics.add(id(buffer))
    for chunk in _chunks(buffers):
        for buffer, received in _broadcast_chunk(chunk, src, group):
            if id(buffer) in statistics:
                buffer.data.copy_(received)
            elif not torch.equal(_bytes_of(buffer), _bytes_of(received)):
                buffer.copy_(received)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if chunk and (nbytes + size > _CHUNK_BYTES or tensor.device != chunk[0].device):
            yield chunk
            chunk, nbytes = [], 0
        chunk.append(tensor)
        nbytes += size
    if chunk:
        yield chunk


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def _broadcast_chunk(
    chunk: Sequence[Tensor], src: int, group: Group
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a tensor and its new value; none on `src`."""
    flat = torch.cat([_bytes_of(tensor) for tensor in chunk])
    collectives.broadcast(flat, group=group, group_src=src)
    if group.rank() == src:
        return
    begin = 0
    for tensor in chunk:
        size = tensor.numel() * tensor.element_size()
        # Not a view of `flat`: that need not be aligned for the dtype.
        part = flat[begin : begin + size].clone()
        begin += size
        yield tensor, part.view(tensor.dtype).view(tensor.shape)
