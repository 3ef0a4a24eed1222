"""Two results side by side, and a result held against a stored one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pycoll.bench.cases import Case
from pycoll.bench.compare import Plan, World
from pycoll.bench.results import Comparison, Row
from pycoll.bench.units import format_nbytes, format_seconds


class Verdict(Enum):
    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    NOISE = "noise"  # the medians differ by more than the margin, but the rounds overlap


@dataclass(frozen=True)
class Change:
    """One case of one backend, before and now.

    Attributes:
        speedup: old time / new time.
    """

    old: Row
    new: Row
    speedup: float
    verdict: Verdict

    def line(self) -> str:
        row, times = self.new, (format_seconds(self.old.seconds), format_seconds(self.new.seconds))
        name = f"{row.backend} {row.op} {row.place} {row.dtype} n={row.world_size} {format_nbytes(row.nbytes)}"
        return (
            f"{name}: {times[0]} -> {times[1]}, {self.speedup:.2f} x as fast, {self.verdict.value}"
        )


def changes(old: Comparison, new: Comparison, margin: float = 0.1) -> list[Change]:
    """Every case that both have figures of, in the new one's order.

    Args:
        old, new: results of runs on machines that can be compared; that is the caller's affair.
        margin: relative difference of medians up to which they count as the same.
    """
    _check_margin(margin)
    before = {(row.case, row.backend): row for row in old.rows if row.samples}
    pairs = [(before.get((row.case, row.backend)), row) for row in new.rows if row.samples]
    return [_change(was, row, margin) for was, row in pairs if was is not None]


def _check_margin(margin: float) -> None:
    if not (margin >= 0 and math.isfinite(margin)):
        raise ValueError(f"margin is {margin}, but must be a number from 0")


def _change(old: Row, new: Row, margin: float) -> Change:
    speedup = old.seconds / new.seconds
    if 1 / (1 + margin) <= speedup <= 1 + margin:
        return Change(old, new, speedup, Verdict.SAME)
    olds, news = ([sample.seconds for sample in row.samples] for row in (old, new))
    if max(min(olds), min(news)) <= min(max(olds), max(news)):
        return Change(old, new, speedup, Verdict.NOISE)
    return Change(old, new, speedup, Verdict.FASTER if speedup > 1 else Verdict.SLOWER)


def plan_again(stored: Comparison, rounds: int | None = None) -> Plan:
    """The plan that gave a stored result."""
    sizes: dict[int, list[Case]] = {}
    for row in stored.rows:
        case = Case(
            row.op,
            max(1, row.nbytes),
            row.dtype,
            row.async_op,
            row.place == "in",
            row.reduce_op,
            row.device,
        )
        cases = sizes.setdefault(row.world_size, [])
        if case not in cases:
            cases.append(case)
    worlds = tuple(World(n, tuple(cases)) for n, cases in sizes.items())
    return Plan(stored.backends, worlds, rounds or int(stored.facts.get("rounds", 5)))


def regressions(stored: Comparison, new: Comparison, margin: float) -> list[str]:
    """A line for each case whose speed, as a ratio to the first backend's in the same run, is below the stored ratio by
    more than the margin: new ratio < stored ratio / (1 + margin). Times are not compared: they are another machine's.
    A case that has gone wrong, or is missing, counts too.
    """
    _check_margin(margin)
    refused = {(row.case, row.backend) for row in stored.rows if row.error is not None}
    again = tuple(row for row in new.rows if (row.case, row.backend) not in refused)
    lines = Comparison(new.backends, again, new.facts).failures
    found = {(row.case, row.backend): row for row in new.rows}
    for row in stored.rows:
        was = stored.ratio(row)
        if was is None:
            continue
        other = found.get((row.case, row.backend))
        now = new.ratio(other) if other is not None and other.samples else None
        name = f"{row.backend}: {row.title}"
        if now is None:
            lines.append(f"{name}: not measured, was {was.median:.2f} x {stored.backends[0]}")
        elif now.median < was.median / (1 + margin):
            lines.append(
                f"{name}: {now.median:.2f} x as fast as {stored.backends[0]}, was {was.median:.2f} "
                f"(margin {margin:.0%})"
            )
    return lines


def summary(listed: Sequence[Change]) -> str:
    """How many of each verdict, and the geometric mean of the speedups."""
    if not listed:
        return "the files have no case in common"
    counts = {verdict: sum(c.verdict is verdict for c in listed) for verdict in Verdict}
    mean = math.exp(sum(math.log(change.speedup) for change in listed) / len(listed))
    parts = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
    return f"{len(listed)} cases: {parts}; {mean:.2f} x as fast (geometric mean)"
