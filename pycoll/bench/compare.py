"""Several backends in one run, in turn, so that what the machine does meanwhile happens to all of
them.

A round measures each case on each backend before the next case, and every second round goes through
the backends in reverse. Medians over the rounds are reported, and ratios with the extremes of the
rounds' own ratios.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pycoll.bench.cases import Case, total_nbytes
from pycoll.bench.engine import Effort
from pycoll.bench.limit import measure_limit
from pycoll.bench.link import link_of
from pycoll.bench.peers import check_peer
from pycoll.bench.ranks import RankGroup, Refusal
from pycoll.bench.results import Comparison, Row, Sample, machine_facts
from pycoll.bench.units import format_nbytes

Progress = Callable[[int, int, str], None]


class Ranks(Protocol):
    """A peer's ranks: `ranks.RankGroup`, or `torchrun.JoinedGroup`."""

    facts: dict[str, Any]

    def wait_until_ready(self) -> None: ...
    def measure(
        self, case: Case, effort: Effort, beside_products: bool = False
    ) -> Sample | Refusal: ...
    def __enter__(self) -> Ranks: ...
    def __exit__(self, *what: Any) -> None: ...


class Start(Protocol):
    def __call__(
        self, peer: str, world_size: int, timeout: float = 120.0, *, device: str = "cpu"
    ) -> Ranks: ...


Turn = tuple[dict[str, Ranks], Case, str]


MOST_RANKS = 256  # of some 200 MiB each


@dataclass(frozen=True)
class World:
    """Cases to run with one number of ranks, each with an S of its own."""

    world_size: int
    cases: tuple[Case, ...]

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"the number of ranks must be at least 1, got {self.world_size}")
        if self.world_size > MOST_RANKS:
            raise ValueError(
                f"the number of ranks is {self.world_size}, but each is a process of this host, and the benchmark "
                f"starts at most {MOST_RANKS} of a backend; give fewer"
            )
        seen: dict[tuple[Case, int], Case] = {}
        for case in self.cases:
            nbytes = total_nbytes(case, self.world_size)
            same = seen.setdefault((replace(case, nbytes=1), nbytes), case)
            if same is not case:
                raise ValueError(
                    f"{case.op}: {same.nbytes} B and {case.nbytes} B are the same case on "
                    f"{self.world_size} ranks"
                )


@dataclass(frozen=True)
class Plan:
    """What to compare.

    Attributes:
        backends: names registered with torch.distributed; ratios are against the first.
        worlds: numbers of ranks and their cases.
        rounds: times that each case is measured on each backend.
        effort: how long a case is measured in a round.
        limits: measure the roofline's loop in every round, too.
        beside_products: measure beside a running matrix product.
        fresh_ranks: start new processes for every round. Otherwise they live through all rounds and
            sleep while it is not their turn, which is much quicker; new ones also average over
            where memory and threads happened to land.
        timeout: seconds that one measurement may take.
    """

    backends: tuple[str, ...]
    worlds: tuple[World, ...]
    rounds: int = 5
    effort: Effort = field(default_factory=Effort)
    limits: bool = False
    beside_products: bool = False
    fresh_ranks: bool = False
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if not self.backends or len(set(self.backends)) != len(self.backends):
            raise ValueError(f"backends must be distinct names, got {self.backends}")
        numbers = [world.world_size for world in self.worlds]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"each number of ranks may be given once, got {numbers}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")
        for backend in self.backends:
            check_peer(backend, self.device)

    @property
    def device(self) -> str:
        """The one that all cases share."""
        return next((case.device for world in self.worlds for case in world.cases), "cpu")


def compare(
    plan: Plan,
    on_progress: Progress = lambda done, total, what: None,
    start: Start | None = None,
) -> Comparison:
    """Runs the plan.

    Args:
        plan: what to compare.
        on_progress: called before each measurement with the number done, the total, and a
            description.
        start: makes the ranks of a backend; `RankGroup` unless given.

    Raises:
        RankError: if the ranks of a backend die, hang or disagree. A case that all ranks of a
        backend refuse is a row with an error instead.
    """
    start = start or RankGroup
    total = sum(len(world.cases) for world in plan.worlds) * len(plan.backends) * plan.rounds
    done = 0
    rows: list[Row] = []
    facts = {**machine_facts(), "rounds": plan.rounds, "beside_products": plan.beside_products}
    for world in plan.worlds:
        record = _Record(plan, world)
        with closing(_turns(plan, world, start, facts)) as turns:
            for groups, case, backend in turns:
                what = f"{backend}: {case.op} of {format_nbytes(case.nbytes)} on {world.world_size} ranks"
                on_progress(done, total, what)
                record.limit_once_a_round(case, backend)
                outcome = groups[backend].measure(case, plan.effort, plan.beside_products)
                record.outcomes[case, backend].append(outcome)
                done += 1
        rows += record.rows()
    on_progress(total, total, "done")
    device, most_ranks = plan.device, max((world.world_size for world in plan.worlds), default=1)
    facts["link"] = str(link_of(device, most_ranks))
    return Comparison(plan.backends, tuple(rows), facts)


class _Record:
    """What was measured in one world so far."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan, self._world = plan, world
        self.outcomes: dict[tuple[Case, str], list[Sample | Refusal]] = defaultdict(list)
        self._limits: dict[Case, list[float]] = defaultdict(list)

    def limit_once_a_round(self, case: Case, backend: str) -> None:
        """Measures the roofline where this round has none for the case yet. It is the same in place and out of place:
        so are its bytes.
        """
        limits = self._limits[case]
        if not self._plan.limits or len(limits) > len(self.outcomes[case, backend]):
            return
        limit = measure_limit(case, self._world.world_size)
        limits.append(limit.seconds if limit else math.nan)

    def rows(self) -> list[Row]:
        return [
            self._row(case, backend)
            for case in self._world.cases
            for backend in self._plan.backends
        ]

    def _row(self, case: Case, backend: str) -> Row:
        outcomes, limits = self.outcomes[case, backend], self._limits[case]
        refusals = [outcome.reason for outcome in outcomes if isinstance(outcome, Refusal)]
        samples = tuple(outcome for outcome in outcomes if isinstance(outcome, Sample))
        limit = statistics.median(limits) if limits else math.nan
        return Row.of(
            case,
            total_nbytes(case, self._world.world_size),
            self._world.world_size,
            backend,
            samples=() if refusals else samples,
            error=refusals[0] if refusals else None,
            limit=None if math.isnan(limit) else limit,
        )


def _turns(
    plan: Plan, world: World, start: Start, facts: dict[str, Any]
) -> Generator[Turn, None, None]:
    """The measurements of one world in their order, each with the groups that are alive then."""
    rounds = list(range(plan.rounds))
    for lifetime in [[number] for number in rounds] if plan.fresh_ranks else [rounds]:
        with ExitStack() as stack:
            groups = {
                backend: stack.enter_context(
                    start(backend, world.world_size, plan.timeout, device=plan.device)
                )
                for backend in plan.backends
            }
            for backend, group in groups.items():
                group.wait_until_ready()
                if group.facts:
                    facts[backend] = group.facts
            for number in lifetime:
                for case in world.cases:
                    for backend in plan.backends[:: -1 if number % 2 else 1]:
                        yield groups, case, backend
