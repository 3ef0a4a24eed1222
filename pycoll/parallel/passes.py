"""What is kept of one backward pass of a Reducer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from torch import Tensor

from pycoll.bucket import BucketFacts, BucketRecord
from pycoll.parallel.reduction import Reduction


class Token:
    """Held by what autograd calls at the end of a graph task: gone before that, the task has failed.

    Either way gradients that come then belong to another pass.
    """

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over

    def __del__(self) -> None:
        self._over()


class Event(IntEnum):
    """What the counter calls for; as in csrc/torch/gradient_counter.h."""

    BEGIN = 0
    COMPLETE = 1
    AGAIN = 2


@dataclass
class Pass:
    number: int
    synchronises: bool
    begun_ns: int
    token: weakref.ref[Token] | None = None  # None: of a rank that only takes part
    reductions: list[Reduction] = field(default_factory=list)
    again: set[int] = field(default_factory=set)  # buckets issued before all gradients were there
    changed: set[int] = field(
        default_factory=set
    )  # parameters used more often than a static graph allows
    not_finite: list[str] = field(default_factory=list)
    saved: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_issued(self) -> int:
        return len(self.reductions)


@dataclass(frozen=True)
class PassRecord:
    """What the timeline is made of. Times are of ``time.monotonic_ns()``."""

    number: int
    begun_ns: int
    end_ns: int
    buckets: list[BucketFacts]
    records: list[BucketRecord]
    ready_ns: list[int]
