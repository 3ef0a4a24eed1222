"""What ranks are connected by, named in every report: a figure without its link says little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Per lane and direction; from the line rates that NVIDIA publishes for each generation.
_NVLINK_GBPS = {1: 20, 2: 25, 3: 25, 4: 25, 5: 50}


@dataclass(frozen=True)
class Link:
    """Attributes:
    kind: "shared memory", "NVLink", "PCIe", "one GPU", "TCP" or "InfiniBand".
    detail: generation and lanes, the name of an interface, or empty.
    """

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})" if self.detail else self.kind


def link_of(device: str, world_size: int, hosts: Sequence[str] = ()) -> Link:
    """The link of a group's ranks.

    Args:
        device: of the tensors. world_size: ranks, which take GPUs in turn. hosts: name of each rank's host,
        where they may differ. Which network connects hosts is for the transport to say;
            none of pycoll's does so yet, so they are said to be connected by TCP.
    """
    if len(set(hosts)) > 1:
        return Link("TCP", f"{len(set(hosts))} hosts")
    if device == "cpu":
        return Link("shared memory")
    import torch

    gpus = min(world_size, torch.cuda.device_count())
    if gpus < 2:
        return Link("one GPU", torch.cuda.get_device_name(0) if gpus else "")
    try:
        import pynvml
    except ImportError:
        return Link("GPUs", "link unknown: pip install nvidia-ml-py")
    return gpu_link(pynvml, gpus)


def gpu_link(nvml: Any, gpus: int) -> Link:
    """The weakest link among the first GPUs.

    Args:
        nvml: the module pynvml, or what looks like it.
        gpus: how many.
    """
    nvml.nvmlInit()
    try:
        weakest: tuple[int, int] | None = None
        for index in range(gpus):
            found = _nvlinks(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
            if found is None:
                return Link("PCIe", f"GPU {index} has no active NVLink")
            weakest = found if weakest is None else min(weakest, found)
        assert weakest is not None
        generation, lanes = weakest
        rate = _NVLINK_GBPS.get(generation)
        speed = f", {rate * lanes} GB/s each way" if rate else ""
        return Link("NVLink", f"generation {generation}, {lanes} lanes a GPU{speed}")
    finally:
        nvml.nvmlShutdown()


def _nvlinks(nvml: Any, handle: Any) -> tuple[int, int] | None:
    """Generation and number of a GPU's active lanes; None without any."""
    versions = []
    for lane in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, lane) == nvml.NVML_FEATURE_ENABLED:
                versions.append(int(nvml.nvmlDeviceGetNvLinkVersion(handle, lane)))
        except nvml.NVMLError:  # no such lane on this GPU
            continue
    return (min(versions), len(versions)) if versions else None
