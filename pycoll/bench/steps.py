"""Times of training steps, and how much of a step is communication that nothing hides."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from pycoll.bench.engine import Clock, Peers


class Laps:
    """A stopwatch: seconds between calls of `lap`, the first one counted from `start`."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._last = 0.0
        self.seconds: list[float] = []

    def start(self) -> None:
        self._last = self._clock()

    def lap(self) -> float:
        """Ends a lap and returns its seconds."""
        now = self._clock()
        self.seconds.append(now - self._last)
        self._last = now
        return self.seconds[-1]

    def median(self, skip: int = 0) -> float:
        """Median lap without the first `skip` ones, or of all if there are no others."""
        return statistics.median(self.seconds[skip:] or self.seconds)


@dataclass(frozen=True)
class ExposedCommunication:
    """Median seconds of a step with and without synchronisation of gradients, over `pairs` of
    steps.
    """

    with_sync: float
    without_sync: float
    pairs: int

    @property
    def share(self) -> float:
        """(with − without) / with. Slightly negative if it is smaller than the noise; not clipped,
        so that this shows.
        """
        return (self.with_sync - self.without_sync) / self.with_sync


def exposed_communication(
    step: Callable[[bool], None], peers: Peers, pairs: int, clock: Clock = time.perf_counter
) -> ExposedCommunication:
    """Measures the share of a training step that synchronising gradients adds to it.

    Runs `pairs` pairs of steps, one with and one without synchronisation, and swaps their order
    from pair to pair, so that drift of the machine falls on both. Each step starts at a barrier;
    the slowest rank's time counts. What is measured is the *exposed* cost: communication that
    overlaps with the backward pass does not count unless it slows that down, and copying gradients
    into buckets does count.

    Args:
        step: runs one whole training step, with synchronisation if its argument is true.
        peers: the ranks that train together.
        pairs: at least 1.
        clock: seconds.
    """
    times: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        for synchronise in (True, False) if pair % 2 == 0 else (False, True):
            peers.barrier()
            start = clock()
            step(synchronise)
            times[synchronise].append(clock() - start)
    return ExposedCommunication(
        with_sync=statistics.median(peers.maxima(times[True])),
        without_sync=statistics.median(peers.maxima(times[False])),
        pairs=pairs,
    )
