"""Times all_reduce at sizes in steps of 1.19, each with one element less and more: no size may be a bad one.

    chrt --rr 10 python benchmarks/smoothness.py -n 2 --json benchmarks/results/smoothness.json

Prints the sizes whose time ÷ limit(size) is further than a margin from those of both neighbours, a step below and
above; and those where an element more or less takes as much longer. The limit is the roofline of the same run. What
seems unsteady is measured a second time with its neighbours, because a busy machine is unsteady, too: a size that is
bad is bad both times.
Exit code: 0; 1 if ranks failed or a result was wrong; 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pycoll.bench.cases import Case
from pycoll.bench.compare import Plan, World, compare
from pycoll.bench.engine import Effort
from pycoll.bench.results import Comparison, Row
from pycoll.bench.units import format_nbytes, format_seconds, parse_nbytes
from pycoll.testing import RankError

BACKENDS = ("pycoll", "pycoll.mapped")
ITEMSIZE = 4
# All repetitions of a small size, and a few calls of the largest.
EFFORT = Effort(repetition_seconds=0.01)


@dataclass(frozen=True)
class Unsteady:
    """A size that is slower, for its limit, than both its neighbours in turn; `factor` is against the nearer one."""

    backend: str
    nbytes: int
    seconds: float
    factor: float


class WrongResultError(Exception):
    """Names the backend, the size and what was wrong."""


def sizes(begin: int, end: int, step: float) -> list[list[int]]:
    """Triples of neighbours in steps of one element."""
    triples, size = [], float(begin)
    while size <= end:
        numel = round(size / ITEMSIZE)
        triples.append([(numel + offset) * ITEMSIZE for offset in (-1, 0, 1)])
        size *= step
    return triples


def unsteady(
    rows: Sequence[Row], triples: Sequence[Sequence[int]], margin: float
) -> list[Unsteady]:
    """Sizes above the margin. At both ends of the range there is one neighbour."""
    found = []
    for backend in BACKENDS:
        of = {row.nbytes: row for row in rows if row.backend == backend}
        score = {nbytes: row.over_limit or float("nan") for nbytes, row in of.items()}
        middles = [middle for _, middle, _ in triples]
        for i, (below, middle, above) in enumerate(triples):
            steps = middles[max(0, i - 1) : i] + middles[i + 1 : i + 2]
            for nbytes, neighbours in ((below, [middle]), (middle, steps), (above, [middle])):
                factor = min(score[nbytes] / score[neighbour] for neighbour in neighbours)
                if factor > 1 + margin:
                    found.append(Unsteady(backend, nbytes, of[nbytes].seconds, factor))
    return found


def measure(triples: Sequence[Sequence[int]], arguments: argparse.Namespace) -> Comparison:
    cases = tuple(Case("all_reduce", nbytes) for triple in triples for nbytes in triple)
    world = World(arguments.world_size, cases)
    result = compare(Plan(BACKENDS, (world,), arguments.rounds, EFFORT, limits=True))
    for row in result.rows:
        if row.error or row.wrong:
            raise WrongResultError(f"{row.backend}, {row.nbytes} B: {row.error or 'wrong result'}")
    return result


def confirmed(
    once: Sequence[Unsteady], triples: Sequence[Sequence[int]], arguments: argparse.Namespace
) -> list[Unsteady]:
    """Those of `once` that a second run finds, too: of their sizes and both neighbours only."""
    sizes_found = {each.nbytes for each in once}
    near = set()
    for i, triple in enumerate(triples):
        if sizes_found.intersection(triple):
            near |= {i - 1, i, i + 1}
    again = [triple for i, triple in enumerate(triples) if i in near]
    twice = unsteady(measure(again, arguments).rows, again, arguments.margin)
    keys = {(each.backend, each.nbytes) for each in once}
    return [each for each in twice if (each.backend, each.nbytes) in keys]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-n", "--world-size", type=int, default=2, metavar="RANKS")
    parser.add_argument("-b", "--begin", type=parse_nbytes, default=1024, help="smallest size (1K)")
    parser.add_argument("-e", "--end", type=parse_nbytes, default=256 << 20, help="largest (256M)")
    parser.add_argument("--step", type=float, default=1.19)
    parser.add_argument("--margin", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    if arguments.step <= 1:
        parser.error(f"--step is {arguments.step}; give a factor above 1")
    if not 2 * ITEMSIZE <= arguments.begin <= arguments.end:
        parser.error(f"sizes go from {arguments.begin} to {arguments.end} B; give 8 B or more")
    triples = sizes(arguments.begin, arguments.end, arguments.step)
    try:
        result = measure(triples, arguments)
        once = unsteady(result.rows, triples, arguments.margin)
        found = confirmed(once, triples, arguments) if once else []
    except ValueError as error:
        parser.error(str(error))
    except (RankError, WrongResultError) as error:
        print(error, file=sys.stderr)
        return 1
    report(result, found, once, arguments)
    return 0


def report(
    result: Comparison,
    found: Sequence[Unsteady],
    once: Sequence[Unsteady],
    arguments: argparse.Namespace,
) -> None:
    title = f"{len(found)} of {len(result.rows)} above {1 + arguments.margin:g} times; {len(once)} in one run of two"
    table = Table(title=title)
    for column in ("backend", "size", "time", "÷ neighbour"):
        table.add_column(column, justify="right")
    for each in found:
        size = f"{each.nbytes} B ({format_nbytes(each.nbytes)})"
        table.add_row(each.backend, size, format_seconds(each.seconds), f"{each.factor:.2f}")
    Console().print(table)
    if arguments.json:
        record = {"facts": result.facts, "margin": arguments.margin, "sizes": {}}
        for row in result.rows:
            times = {"seconds": row.seconds, "limit": row.limit}
            record["sizes"].setdefault(row.nbytes, {})[row.backend] = times
        record["unsteady"] = [vars(each) for each in found]
        record["unsteady_once"] = [vars(each) for each in once]
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {arguments.json}")


if __name__ == "__main__":
    sys.exit(main())
