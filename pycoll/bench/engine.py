"""The clock: how long a collective takes, with nccl-tests' habits.

A repetition is: barrier, K calls back to back, time / K on each rank; the slowest rank's figure
counts. The median over repetitions is the time. Back-to-back calls let one rank run ahead of
another as far as the collective allows, as a training step does; buffers are the same in each call
and as warm in the caches as their size permits. A second pass times each call alone, for the
percentiles. The result is checked on exact data before the timing and after it.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from pycoll.bench.results import Sample

Clock = Callable[[], float]
# A 99th percentile of fewer calls than these is the maximum under another name.
CALLS_FOR_P99 = 100


class Peers(Protocol):
    """The ranks that measure together."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def maxima(self, values: Sequence[float]) -> list[float]:
        """The largest of the ranks' values, position by position; every rank gets the same list."""


class TorchPeers:
    """The ranks of a process group (the default one). Their figures travel over the backend that is
    measured.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: str = "cpu") -> None:
        self._group, self._device = group, device

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def maxima(self, values: Sequence[float]) -> list[float]:
        largest = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return largest.tolist()


class Alone:
    """A single process, which needs no group."""

    def barrier(self) -> None:
        pass

    def maxima(self, values: Sequence[float]) -> list[float]:
        return list(values)


class Work(Protocol):
    """What is measured: `buffers.Buffers`, or a stand-in under test."""

    @property
    def call(self) -> Callable[[], None]: ...
    def load(self) -> None: ...
    def clear(self) -> None: ...
    def finish(self) -> None: ...
    def count_wrong(self) -> int: ...


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        warmup_calls: calls before the first timed one.
        repetitions: timed blocks, of which the median counts.
        repetition_seconds: what a block should last; decides K.
        min_calls, max_calls: bounds of K.
        checks: compare the result with the expected one before the timing and after it.
    """

    warmup_calls: int = 5
    repetitions: int = 3
    repetition_seconds: float = 0.05
    min_calls: int = 2
    max_calls: int = 2000
    checks: bool = True

    def __post_init__(self) -> None:
        if (
            min(self.repetitions, self.min_calls) < 1
            or self.max_calls < self.min_calls
            or self.warmup_calls < 0
        ):
            raise ValueError(
                f"repetitions and calls must be positive, and max_calls >= min_calls: {self}"
            )
        if not 0 < self.repetition_seconds < math.inf:
            raise ValueError(
                f"repetition_seconds is {self.repetition_seconds:g}, but must be above 0, and finite"
            )

    def calls(self, estimated_seconds: float) -> int:
        """K for a call that takes about so long."""
        wanted = (
            self.repetition_seconds / estimated_seconds if estimated_seconds > 0 else self.max_calls
        )
        return int(min(max(wanted, self.min_calls), self.max_calls))


def measure(work: Work, peers: Peers, effort: Effort, clock: Clock = time.perf_counter) -> Sample:
    """Times and checks one collective. Every rank calls it with the same effort and gets the same
    times.

    `Sample.wrong` is this rank's own count: a broken backend must not be trusted to carry it.
    """
    wrong = _wrong_after_one_call(work) if effort.checks else None
    work.clear()
    for _ in range(effort.warmup_calls):
        work.call()
    work.finish()
    with _no_garbage_collection():
        estimate = peers.maxima([_block(work, peers, effort.min_calls, clock)])[0]
        calls = effort.calls(estimate)
        blocks = [_block(work, peers, calls, clock) for _ in range(effort.repetitions)]
        singles = _each(work, peers, calls, clock)
    singles = peers.maxima(singles)
    return Sample(
        seconds=statistics.median(peers.maxima(blocks)),
        p50=percentile(singles, 50),
        p99=percentile(singles, 99) if calls >= CALLS_FOR_P99 else None,
        calls=calls,
        wrong=None if wrong is None else wrong + _wrong_after_one_call(work),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that at least `percent` % of the values do
    not exceed.
    """
    if not values or not 0 < percent <= 100:
        raise ValueError(f"percentile {percent} of {len(values)} values is not defined")
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def _wrong_after_one_call(work: Work) -> int:
    work.load()
    work.call()
    return work.count_wrong()


def _block(work: Work, peers: Peers, calls: int, clock: Clock) -> float:
    """Seconds a call over a block of calls back to back, on this rank."""
    call = work.call
    peers.barrier()
    start = clock()
    for _ in range(calls):
        call()
    work.finish()
    return (clock() - start) / calls


def _each(work: Work, peers: Peers, calls: int, clock: Clock) -> list[float]:
    """Seconds of each of a block's calls, on this rank."""
    call, finish = work.call, work.finish
    durations = [0.0] * calls
    peers.barrier()
    before = clock()
    for index in range(calls):
        call()
        finish()
        after = clock()
        durations[index] = after - before
        before = after
    return durations


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Python's collector runs after so many allocations, on one rank and not on another: it would
    be the p99.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
