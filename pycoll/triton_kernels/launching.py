"""How kernels are started: one place, which tests replace to run kernels elsewhere than on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

BYTES_PER_THREAD = 64  # of one access of a block: four vectors a thread, whose latencies overlap


@dataclass(frozen=True)
class LaunchConfig:
    """What a launch looks like; equal on all ranks of a group.

    num_blocks: programs of the grid, at most 128. num_warps: of each program. bytes_per_thread: moved at once, a
        multiple of 16.
    """

    num_blocks: int = 32
    num_warps: int = 8
    bytes_per_thread: int = BYTES_PER_THREAD

    def __post_init__(self) -> None:
        if not 1 <= self.num_blocks <= 128:
            raise ValueError(f"num_blocks is {self.num_blocks}; give 1 to 128")
        if self.num_warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"num_warps is {self.num_warps}; give a power of two up to 32")
        if self.bytes_per_thread not in (16, 32, 64, 128):
            raise ValueError(f"bytes_per_thread is {self.bytes_per_thread}; give 16, 32, 64 or 128")

    def block_numel(self, itemsize: int) -> int:
        """Elements that a program handles at once."""
        return self.num_warps * 32 * self.bytes_per_thread // itemsize


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments by name, in the order of its parameters; constants are those in capitals."""

    kernel: Any
    num_blocks: int
    num_warps: int
    arguments: Mapping[str, Any]


def _options(launch: Launch) -> dict[str, Any]:
    # Products are rounded before they are added, as everywhere in pycoll.
    return {**launch.arguments, "num_warps": launch.num_warps, "enable_fp_fusion": False}


def start(launch: Launch) -> None:
    """On the device of its tensors, and that device's current stream."""
    import torch

    tensors = [value for value in launch.arguments.values() if isinstance(value, torch.Tensor)]
    with torch.cuda.device_of(tensors[0]):
        launch.kernel[(launch.num_blocks,)](**_options(launch))


def compiled(launch: Launch) -> Any:
    """The kernel of a launch as Triton compiles it for the current device; nothing is started. Its ``run`` loads it.

    Loading may wait for kernels that run: ranks that share a GPU load theirs before any of them waits for another.
    """
    return launch.kernel.warmup(grid=(launch.num_blocks,), **_options(launch))


_start: Callable[[Launch], None] = start


def launch(kernel: Any, num_blocks: int, num_warps: int, **arguments: Any) -> None:
    _start(Launch(kernel, num_blocks, num_warps, arguments))


@contextmanager
def started_by(function: Callable[[Launch], None]) -> Iterator[None]:
    """Within it `function` gets what would be launched."""
    global _start
    before, _start = _start, function
    try:
        yield
    finally:
        _start = before
