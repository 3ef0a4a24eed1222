"""Several backends in one run, in turn, so that what the machine does meanwhile happens to all of
them.

A round measures each case on each backend before the next case, and every second round goes through
the backends in reverse. Medians over the rounds are reported, and ratios with the extremes of the
rounds' own ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from pycoll.bench.collectives import Case, total_nbytes
from pycoll.bench.engine import Effort
from pycoll.bench.ranks import RankGroup, Refusal
from pycoll.bench.results import Comparison, Row, Sample, machine_facts
from pycoll.bench.units import format_nbytes

Progress = Callable[[int, int, str], None]
Turn = tuple[dict[str, RankGroup], Case, str]


@dataclass(frozen=True)
class World:
    """Cases to run with one number of ranks, each with an S of its own."""

    world_size: int
    cases: tuple[Case, ...]

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"the number of ranks must be at least 1, got {self.world_size}")
        seen: dict[Case, Case] = {}
        for case in self.cases:
            same = seen.setdefault(replace(case, nbytes=total_nbytes(case, self.world_size)), case)
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
        fresh_ranks: start new processes for every round. Otherwise they live through all rounds and
            sleep while it is not their turn, which is much quicker; new ones also average over
            where memory and threads happened to land.
        timeout: seconds that one measurement may take.
    """

    backends: tuple[str, ...]
    worlds: tuple[World, ...]
    rounds: int = 5
    effort: Effort = field(default_factory=Effort)
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
            check_backend(backend)


def check_backend(backend: str) -> None:
    """Raises ValueError unless torch.distributed has this backend and it takes CPU tensors."""
    capable = dist.Backend.backend_capability
    usable = [
        name
        for name in dist.Backend.backend_list
        if "cpu" in capable.get(name, ()) and name != "fake"
    ]
    usable = [name for name in usable if dist.is_backend_available(name)]
    if backend not in usable:
        raise ValueError(
            f"unknown backend {backend!r}; those for CPU tensors here: {', '.join(usable)}"
        )


def compare(plan: Plan, on_progress: Progress = lambda done, total, what: None) -> Comparison:
    """Runs the plan.

    Args:
        plan: what to compare.
        on_progress: called before each measurement with the number done, the total, and a
            description.

    Raises:
        RankError: if the ranks of a backend die, hang or disagree. A case that all ranks of a
        backend refuse is a row with an error instead.
    """
    total = sum(len(world.cases) for world in plan.worlds) * len(plan.backends) * plan.rounds
    done = 0
    rows: list[Row] = []
    for world in plan.worlds:
        outcomes: dict[tuple[Case, str], list[Sample | Refusal]] = {}
        with closing(_turns(plan, world)) as turns:
            for groups, case, backend in turns:
                what = f"{backend}: {case.op} of {format_nbytes(case.nbytes)} on {world.world_size} ranks"
                on_progress(done, total, what)
                outcome = groups[backend].measure(case, plan.effort)
                outcomes.setdefault((case, backend), []).append(outcome)
                done += 1
        rows += [
            _row(case, world, backend, outcomes[case, backend])
            for case in world.cases
            for backend in plan.backends
        ]
    on_progress(total, total, "done")
    return Comparison(plan.backends, tuple(rows), {**machine_facts(), "rounds": plan.rounds})


def _turns(plan: Plan, world: World) -> Generator[Turn, None, None]:
    """The measurements of one world in their order, each with the groups that are alive then."""
    rounds = list(range(plan.rounds))
    for lifetime in [[number] for number in rounds] if plan.fresh_ranks else [rounds]:
        with ExitStack() as stack:
            groups = {
                backend: stack.enter_context(RankGroup(backend, world.world_size, plan.timeout))
                for backend in plan.backends
            }
            for group in groups.values():
                group.wait_until_ready()
            for number in lifetime:
                for case in world.cases:
                    for backend in plan.backends[:: -1 if number % 2 else 1]:
                        yield groups, case, backend


def _row(case: Case, world: World, backend: str, outcomes: Sequence[Sample | Refusal]) -> Row:
    refusals = [outcome.reason for outcome in outcomes if isinstance(outcome, Refusal)]
    samples = tuple(outcome for outcome in outcomes if isinstance(outcome, Sample))
    return Row(
        op=case.op,
        nbytes=total_nbytes(case, world.world_size),
        dtype=case.dtype,
        async_op=case.async_op,
        world_size=world.world_size,
        backend=backend,
        samples=() if refusals else samples,
        error=refusals[0] if refusals else None,
    )
