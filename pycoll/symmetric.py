"""CPU tensors that the other ranks of the host map, so that collectives on them copy nothing.

Three doors to the same memory (docs/memory_model.md, "Tensors that peers reach directly"):

- :func:`symmetric_empty` makes one tensor there;
- :func:`shared_allocator` makes ordinary ``torch.empty(...)``, and all that computes new tensors, use it within a
  ``with`` block; :func:`use_shared_allocator`, or ``PYCOLL_SHARED_ALLOC=1`` in the environment, for the whole process.

No group has to exist yet, and all groups of the process, made before or after, can use the memory. Nothing
is collective: if the tensor of one rank lies elsewhere, an operation is slower, and its result the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from pycoll import _core

if TYPE_CHECKING:
    import torch

_AS_PROCESS, _SHARED, _PLAIN = range(3)


def symmetric_empty(
    *size: int | tuple[int, ...] | list[int],
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """An uninitialised, contiguous CPU tensor in memory that the other ranks of the host map.

    Args:
        size: its shape, as integers or as one sequence.
        dtype: None: torch's default dtype.
        requires_grad: whether autograd records operations on it.

    Raises:
        ValueError: a negative size.
        RuntimeError: the system has no memory left, or ``PYCOLL_SEGMENT_BYTES`` of address space are used up.
    """
    import torch

    shape = list(size[0]) if len(size) == 1 and not isinstance(size[0], int) else list(size)
    if any(cast(int, extent) < 0 for extent in shape):
        raise ValueError(f"size is {tuple(shape)}; extents must not be negative")
    kind = torch.get_default_dtype() if dtype is None else dtype
    tensor = _core.load().shared_empty(shape, kind)
    return cast("torch.Tensor", tensor.requires_grad_(requires_grad))


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether the storage of `tensor` lies in memory that the other ranks of the host map."""
    return bool(_core.load().is_shared_tensor(tensor))


@contextmanager
def shared_allocator(enabled: bool = True) -> Iterator[None]:
    """Within the block, CPU tensors that this thread makes lie in memory that the other ranks of the host map.

    Storages of up to 16 KiB do not: such tensors travel beside the signal anyway. Neither do those that a forked child
    makes, nor those for which there is no room (with one warning). Tensors keep their memory when the block ends.

    Args:
        enabled: False: within the block this thread's tensors are plain, also under :func:`use_shared_allocator`.

    Raises:
        ValueError: another library has put an allocator of its own in front.
    """
    core = _core.load()
    core.install_shared_allocator()
    before = core.set_shared_for_thread(_SHARED if enabled else _PLAIN)
    try:
        yield
    finally:
        core.set_shared_for_thread(before)


def use_shared_allocator(on: bool = True) -> None:
    """The same as :func:`shared_allocator` for all threads of the process, from now on.

    ``PYCOLL_SHARED_ALLOC=1`` in the environment does it when torch is imported.

    Raises:
        ValueError: another library has put an allocator of its own in front.
    """
    core = _core.load()
    core.install_shared_allocator()
    core.set_shared_for_process(on)


def shared_memory_stats() -> dict[str, int]:
    """Bytes of this process's tensors in shared memory.

    ``bytes_in_use`` counts live storages in whole pages, ``bytes_cached`` freed ones that keep their memory for the
    next ones, ``num_blocks`` the live ones.
    """
    return cast("dict[str, int]", dict[str, Any](_core.load().shared_stats()))


def release_cached_shared_memory() -> None:
    """Gives memory of freed storages back to the system. It also happens by itself, as programs need less."""
    _core.load().trim_shared()
