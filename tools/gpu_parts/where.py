"""Where the parts run: on the GPU, or, for tests of the script, on the simulator of CUDA kernels and Triton's
interpreter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

SIMULATES = os.environ.get("PYCOLL_GPU_CHECK_SIMULATE") == "1"
DEVICE = "cpu" if SIMULATES else "cuda"

if SIMULATES:
    os.environ["TRITON_INTERPRET"] = "1"


class Rank:
    """What is one rank's own: a stream, or a simulated device."""

    def __init__(self, rank: int) -> None:
        self._device: Any = None
        if SIMULATES:
            from simulated_device import SimulatedDevice

            self._device = SimulatedDevice(seed=rank + 1)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        if self._device is not None:
            with self._device.active():
                yield
            return
        torch.cuda.set_device(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            yield

    def finish(self) -> None:
        """Until all that this rank has put into its streams has run."""
        if self._device is not None:
            self._device.synchronise()
        else:
            torch.cuda.current_stream().synchronize()
