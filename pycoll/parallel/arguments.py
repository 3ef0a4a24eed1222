"""Arguments of wrappers: what is refused, and which group is meant."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn


def refuse(**arguments: Any) -> None:
    """Raises NotImplementedError for the first that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"pycoll's DistributedDataParallel has no {name}; leave it out (for lower precision: autocast, or a "
                "communication hook)"
            )


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
