"""Arguments of wrappers: what is refused, and which group is meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycoll.parallel.model import sparse_parameters


def delayed_names(
    module: nn.Module, named: Sequence[tuple[str, nn.Parameter]] | None, until: nn.Parameter | None
) -> tuple[tuple[str, ...], str | None]:
    """Names of the parameters whose gradients wait for another's, and the name of that one.

    Raises:
        ValueError: only one of both arguments is given, or one is not what it has to be.
    """
    if named is None and until is None:
        return (), None
    if named is None or until is None:
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time, got "
            f"{'only the second' if named is None else 'only the first'}"
        )
    known = dict(module.named_parameters())
    leader = next((name for name, p in known.items() if p is until), None)
    if leader is None or not until.requires_grad:
        raise ValueError(
            "param_to_hook_all_reduce has to be a parameter of the module that requires a gradient, got "
            + ("one of another module" if leader is None else f"{leader!r}, which does not")
        )
    for name, p in named:
        if known.get(name) is not p:
            raise ValueError(
                f"delay_all_reduce_named_params holds {name!r}, which is not that parameter of the module; "
                "take its entries from module.named_parameters()"
            )
        if p is until:
            raise ValueError(f"{name!r} cannot wait for itself; take it out of the list")
        if (p.dtype, p.device) != (until.dtype, until.device):
            raise ValueError(
                f"{name!r} is {p.dtype} on {p.device}, but waits for {leader!r}, which is {until.dtype} on "
                f"{until.device}; they have to share a bucket"
            )
    sparse = sparse_parameters(module)
    for name in (leader, *(name for name, _ in named)):
        if id(known[name]) in sparse:
            raise ValueError(f"{name!r} has sparse gradients, which cannot share a bucket")
    return tuple(name for name, _ in named), leader


def group_of(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """The group, that of a one-dimensional mesh, or (both None) the default one."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {device_mesh.ndim} dims; slice it by a dim's name"
            )
        return device_mesh.get_group(mesh_dim=0)
    if process_group is not None:
        return process_group
    if not dist.is_initialized():
        raise ValueError("there is no default group; call init_process_group first")
    return dist.group.WORLD  # type: ignore[return-value]


def devices_of(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: Any
) -> tuple[list[int] | None, int | None]:
    """`device_ids` and `output_device` as indices, as torch's wrapper keeps them.

    Raises:
        ValueError: the module's parameters lie where pycoll moves nothing, or partly on the CPU and partly on GPUs; or
            the arguments do not name the one GPU that it is on.
    """
    devices = {p.device for p in module.parameters()}
    shown = sorted(map(str, devices))
    if any(device.type not in ("cpu", "cuda") for device in devices):
        raise ValueError(
            f"the module has parameters on {shown}; pycoll moves tensors of CPUs and of CUDA devices"
        )
    if len({device.type for device in devices}) > 1:
        raise ValueError(
            f"the module has parameters on {shown}; move them all to the CPU, or all to GPUs"
        )
    if not device_ids and output_device is None:
        return None, None
    if len(devices) != 1 or devices == {torch.device("cpu")}:
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with modules on a single GPU, "
            f"but got device_ids {device_ids}, output_device {output_device}, and a module on {shown}"
        )
    if device_ids and len(device_ids) > 1:
        raise ValueError(
            f"device_ids is {device_ids}, but a process drives one GPU; give the module's, or None"
        )
    (where,) = devices
    ids = [_index_of(device, where) for device in device_ids or [where]]
    if ids != [where.index]:
        raise ValueError(
            f"device_ids is {device_ids}, but the module is on {where}; move it with .to(), or give that device"
        )
    return ids, where.index if output_device is None else _index_of(output_device, where)


def _index_of(device: int | str | torch.device, where: torch.device) -> int:
    """A GPU's; "cuda" is the one that the module is on."""
    if isinstance(device, int):
        return device
    return where.index if device in ("cuda", torch.device("cuda")) else torch.device(device).index
