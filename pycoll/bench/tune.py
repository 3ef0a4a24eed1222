"""From measured times of pycoll's algorithms to the table by which its selector chooses (`pycoll.tuning`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pycoll.backend import extension
from pycoll.bench.cases import Case
from pycoll.bench.compare import Plan, Progress, World, compare
from pycoll.bench.engine import Effort
from pycoll.bench.formulas import CUT_INTO_PARTS
from pycoll.bench.peers import PYCOLL
from pycoll.bench.results import Comparison
from pycoll.tuning import Row

# A change of algorithm has to pay: by 10 % at one size, or by less at several.
SWITCH_COST = math.log(1.1)


def tunable() -> dict[str, tuple[str, ...]]:
    """Collectives for which there is a choice that keeps the fixed order of additions, with their algorithms."""
    choices: dict[str, tuple[str, ...]] = {}
    for collective, name, keeps_order in extension().algorithms():
        if keeps_order:
            choices[collective] = (*choices.get(collective, ()), name)
    return {collective: names for collective, names in choices.items() if len(names) > 1}


def measure_table(
    world_sizes: Sequence[int],
    sizes: Sequence[int],
    *,
    dtype: str = "float32",
    rounds: int = 5,
    effort: Effort | None = None,
    on_progress: Progress = lambda done, total, what: None,
) -> tuple[list[Row], list[Comparison]]:
    """Measures every tunable collective with each of its algorithms, interleaved, and chooses.

    Args:
        world_sizes: numbers of ranks, each with rows of its own.
        sizes: S in bytes, in increasing order.
        dtype: of the elements.
        rounds, effort: as in `compare.Plan`.
        on_progress: as in `compare.compare`, once a collective.

    Returns:
        the table's rows, and what they were chosen from.

    Raises:
        RankError: ranks died or hung.
        ValueError: an algorithm gave wrong results, or the sizes make no sense.
    """
    rows: list[Row] = []
    measured = []
    for op, names in tunable().items():
        worlds = tuple(
            World(n, tuple(Case(op, nbytes, dtype) for nbytes in sizes)) for n in world_sizes
        )
        backends = tuple(f"{PYCOLL}:{name}" for name in names)
        plan = Plan(backends, worlds, rounds)
        comparison = compare(replace(plan, effort=effort) if effort else plan, on_progress)
        if comparison.failures:
            raise ValueError(f"nothing is stored: {comparison.failures[0]}")
        measured.append(comparison)
        rows += choose(comparison, op)
    return rows, measured


def choose(comparison: Comparison, op: str) -> list[Row]:
    """The table's rows for one collective, from a comparison of ``pycoll:ALGORITHM`` backends."""
    rows = []
    for world_size in dict.fromkeys(row.world_size for row in comparison.rows):
        times: dict[int, dict[str, float]] = {}
        for row in comparison.rows:
            if row.op == op and row.world_size == world_size and row.samples:
                name = row.backend.partition(":")[2]
                times.setdefault(_per_rank(op, row.nbytes, world_size), {})[name] = row.seconds
        for name, most in cheapest_path(times):
            rows.append(Row(world_size, op, name, most))
    return rows


def _per_rank(op: str, nbytes: int, world_size: int) -> int:
    """What the selector calls the size: a rank's tensor, a part of S where the op cuts S into parts."""
    return nbytes // world_size if op in CUT_INTO_PARTS else nbytes


def cheapest_path(times: Mapping[int, Mapping[str, float]]) -> list[tuple[str, int | None]]:
    """Which algorithm up to which size: the choice with the least sum of log(time), where each change of
    algorithm costs `SWITCH_COST`. Between two measured sizes the change lies at their geometric mean; the last
    row has no limit.

    Args:
        times: seconds of each algorithm at each size; all sizes have all algorithms.
    """
    sizes = sorted(times)
    names = list(times[sizes[0]])
    # cost[name]: of the best path to this size that ends with the algorithm; path: its choices.
    cost = dict.fromkeys(names, 0.0)
    path: dict[str, list[str]] = {name: [] for name in names}
    for size in sizes:
        step: dict[str, tuple[float, list[str]]] = {}
        for name in names:
            before = min(names, key=lambda other: cost[other] + (other != name) * SWITCH_COST)
            total = cost[before] + (before != name) * SWITCH_COST + math.log(times[size][name])
            step[name] = total, [*path[before], name]
        cost = {name: total for name, (total, _) in step.items()}
        path = {name: chosen for name, (_, chosen) in step.items()}
    chosen = path[min(names, key=cost.__getitem__)]
    rows: list[tuple[str, int | None]] = []
    for index, name in enumerate(chosen[:-1]):
        if chosen[index + 1] != name:
            rows.append((name, math.isqrt(sizes[index] * sizes[index + 1])))
    return [*rows, (chosen[-1], None)]
