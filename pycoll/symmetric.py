"""Tensors that the other ranks of the host map, so that collectives on them copy nothing.

Three doors to the same memory (docs/memory_model.md, "Tensors that peers reach directly"):

- :func:`symmetric_empty` makes one tensor there;
- :func:`shared_allocator` makes ordinary ``torch.empty(...)``, and all that computes new tensors, use it within a
  ``with`` block; :func:`use_shared_allocator`, or ``PYCOLL_SHARED_ALLOC=1`` in the environment, for the whole process.

No group has to exist yet, and all groups of the process, made before or after, can use the memory. Nothing
is collective: if the tensor of one rank lies elsewhere, an operation is slower, and its result the same.

That is the CPU. On GPUs symmetric memory belongs to a group: :func:`symmetric_empty` with a device and a group, and
:func:`register_symmetric` for what lies in a ``torch.cuda.MemPool`` of symmetric memory, are collective, and an
operation's tensors lie there on all ranks or on none (docs/cuda_path.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING, Any, cast

from pycoll import _core
from pycoll.backend import backend_of

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_AS_PROCESS, _SHARED, _PLAIN = range(3)


def symmetric_empty(
    *size: int | tuple[int, ...] | list[int],
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """An uninitialised, contiguous tensor in memory that the other ranks of the host map.

    Args:
        size: its shape, as integers (anything with ``__index__``) or as one sequence.
        dtype: None: torch's default dtype.
        requires_grad: whether autograd records operations on it.
        device: of a GPU, all ranks of `group` call it, with the same size.
        group: for GPUs; None: the default group.

    Raises:
        TypeError: `size` is no shape, or `dtype` no dtype.
        ValueError: a negative size; a group that is not pycoll's.
        RuntimeError: the system has no memory left, or ``PYCOLL_SEGMENT_BYTES`` of address space are used up.
    """
    import torch

    shape = _shape_of(size)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"size is {tuple(shape)}; extents must not be negative")
    kind = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(kind, torch.dtype):
        raise TypeError(f"dtype is {kind!r}, a {type(kind).__name__}; pass a torch.dtype or None")
    if torch.device(device).type != "cpu":
        import torch.distributed._symmetric_memory as symm_mem

        tensor = symm_mem.empty(shape, dtype=kind, device=torch.device(device))
        register_symmetric(tensor, group)
        return tensor.requires_grad_(requires_grad)
    tensor = _core.load().shared_empty(shape, kind)
    return cast("torch.Tensor", tensor.requires_grad_(requires_grad))


def _shape_of(size: tuple[Any, ...]) -> list[int]:
    extents = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    try:
        return [index(extent) for extent in extents]
    except TypeError:
        given = size[0] if len(size) == 1 else size
        raise TypeError(
            f"size is {given!r}; pass whole numbers, or one tuple or list of them"
        ) from None


def register_symmetric(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Lets operations of `group` on this tensor of symmetric memory, and on its parts, copy nothing.

    Symmetric memory is what ``torch.distributed._symmetric_memory.empty`` makes, or ``torch.empty`` within
    ``torch.cuda.use_mem_pool`` of a pool of such memory. All ranks call it, in the same order, with tensors at the
    same place. The whole allocation becomes known, and stays until the group goes. From then on an operation's
    tensors lie in it on all ranks, at the same place, or on none: others raise.

    Raises:
        ValueError: the group is not pycoll's, or the tensor is not contiguous or not on a GPU.
        RuntimeError: the tensor is not in symmetric memory.
    """
    backend = backend_of(group, tensor.device)
    if not backend.runs_on_device(tensor.device):
        raise ValueError(
            f"tensor is on {tensor.device}, but only those of GPUs have to be registered; tensors of the CPU that "
            "symmetric_empty or shared_allocator made are known to all groups"
        )
    backend.register_symmetric(tensor)


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
