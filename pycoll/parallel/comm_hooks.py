"""Communication hooks that send a quarter of the bytes: gradients as 8-bit numbers with error feedback.

    state = Float8State()                            # or Int8State(); on all ranks
    ddp.register_comm_hook(state, quantised_hook)

A bucket is cut into a chunk a rank. Every rank encodes its gradients and sends each rank that rank's chunk; the
owner of a chunk decodes what it gets, adds it up in float32 in rank order, encodes the mean and sends it to all.
What rounding has taken from a gradient, and from a mean, is kept and added in the next step, so that over many
steps nothing is lost [1]. All ranks decode the same bytes: their weights stay equal bit for bit. Unlike plain
reductions the result depends on the buckets, since blocks that share a scale do.

[1] Error feedback for both directions: H. Tang et al., DoubleSqueeze, ICML 2019.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pycoll import collectives
from pycoll.parallel.quantise import FP8, INT8, BlockFormat, decode, encode


@dataclass
class _Residuals:
    """What rounding has taken and the next step gives back; of one bucket."""

    members: tuple[int, ...]
    gradients: Tensor  # (ranks, chunk)
    means: Tensor  # (1, chunk)


@dataclass(eq=False)
class QuantisedState:
    """State of `quantised_hook`. The hook has a group of its own, which is made here: all ranks of the world call this,
    as they do ``torch.distributed.new_group``.

    Args:
        block: how elements are encoded.
        process_group: the wrapper's; None: the default group.
        error_feedback: keep what rounding takes for the next step.
    """

    block: BlockFormat
    process_group: dist.ProcessGroup | None = None
    error_feedback: bool = True
    streams: dict[torch.device, Any] = field(default_factory=dict, init=False, repr=False)
    _residuals: dict[int, _Residuals] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        ranks = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        self.group: Any = dist.new_group(ranks, backend="pycoll")
        # Buckets go one after the other, on a thread beside the backward pass.
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="pycoll-quantised")

    def residuals(
        self, bucket: Any, world_size: int, chunk: int, device: torch.device
    ) -> _Residuals:
        """Zeros for a bucket that has not been seen with these parameters."""
        members = tuple(map(id, bucket.parameters()))
        known = self._residuals.get(bucket.index())
        if known is None or known.members != members:
            gradients = torch.zeros(world_size, chunk, device=device)
            known = _Residuals(members, gradients, torch.zeros(1, chunk, device=device))
            self._residuals[bucket.index()] = known
        return known


class Int8State(QuantisedState):
    """Block-scaled int8: 256 elements share a float32 scale, 1.016 bytes an element."""

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, error_feedback: bool = True
    ) -> None:
        super().__init__(INT8, process_group, error_feedback)


class Float8State(QuantisedState):
    """float8_e4m3fn, 256 elements to a float32 scale: 1.016 bytes an element."""

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, error_feedback: bool = True
    ) -> None:
        super().__init__(FP8, process_group, error_feedback)


def quantised_hook(state: QuantisedState, bucket: Any) -> torch.futures.Future:
    """The hook for ``register_comm_hook``; the future's value is the mean, (numel,) of the bucket's dtype."""
    if bucket.buffer().is_cuda:
        return _in_a_stream(state, bucket)
    future: torch.futures.Future = torch.futures.Future()

    def run() -> None:
        try:
            future.set_result(_reduce(state, bucket))
        except Exception as error:
            future.set_exception(error)

    state.worker.submit(run)
    return future


def _in_a_stream(state: QuantisedState, bucket: Any) -> torch.futures.Future:
    """The host waits for nothing here: a stream goes on beside the backward pass. Waiting for the future makes the
    current stream wait."""
    device = bucket.buffer().device
    if device not in state.streams:
        state.streams[device] = torch.cuda.Stream(device)
    stream = state.streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    future: torch.futures.Future = torch.futures.Future(devices=[device])
    with torch.cuda.stream(stream):
        future.set_result(_reduce(state, bucket))
    return future


# Its collectives are on a group of their own, in the order of the buckets.
quantised_hook.may_overlap = True  # type: ignore[attr-defined]


@torch.no_grad()
def _reduce(state: QuantisedState, bucket: Any) -> Tensor:
    world_size = dist.get_world_size(state.group)
    buffer: Tensor = bucket.buffer()
    per_rank = -(-buffer.numel() // (world_size * state.block.block_numel))
    chunk = per_rank * state.block.block_numel
    values = torch.zeros(world_size, chunk, device=buffer.device)
    values.view(-1)[: buffer.numel()] = buffer
    kept = state.residuals(bucket, world_size, chunk, buffer.device)
    if state.error_feedback:
        values += kept.gradients
    rows = encode(values, state.block)
    if state.error_feedback:
        kept.gradients = _finite(values - decode(rows, state.block))
    received = torch.empty_like(rows)
    collectives.all_to_all_single(received, rows, group=state.group)
    mean = torch.zeros(1, chunk, device=buffer.device)
    for row in received:
        mean += decode(row[None], state.block)
    mean /= world_size
    if state.error_feedback:
        mean += kept.means
    sent = encode(mean, state.block)
    if state.error_feedback:
        kept.means = _finite(mean - decode(sent, state.block))
    gathered = torch.empty_like(rows)
    collectives.all_gather_into_tensor(gathered.view(-1), sent.view(-1), state.group)
    return decode(gathered, state.block).view(-1)[: buffer.numel()].to(buffer.dtype)


def _finite(residual: Tensor) -> Tensor:
    """A step that overflowed leaves nothing behind for the next one."""
    return torch.nan_to_num(residual, nan=0.0, posinf=0.0, neginf=0.0)
