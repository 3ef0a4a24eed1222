"""Arguments of wrappers: what is refused, and which group is meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def check_devices(module: nn.Module, device_ids: Any, output_device: Any) -> None:
    """Raises ValueError unless the module and these arguments are for the CPU."""
    devices = {p.device for p in module.parameters()}
    if any(device.type != "cpu" for device in devices):
        raise ValueError(
            f"the module has parameters on {sorted(map(str, devices))}; this build of pycoll moves CPU tensors only"
        )
    if device_ids or output_device is not None:
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with GPU modules, "
            f"but got device_ids {device_ids}, output_device {output_device}, and a module on the CPU"
        )
