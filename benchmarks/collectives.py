"""Times collectives on several backends in turn and prints medians, bus bandwidth and ratios.

    python benchmarks/collectives.py --backends gloo,pycoll --ops all_reduce -n 2 --sizes 8,16M \\
        --rounds 5 --json benchmarks/results/all_reduce.json

`--cases 2:8,16M --cases 4:8` gives each number of ranks its own sizes, in one run. Exit code: 0;
1 if a backend gave a wrong result, refused a case or failed; 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import Progress, TaskID

from pycoll.bench.collectives import DTYPES, OPS, Case
from pycoll.bench.compare import Plan, World, compare
from pycoll.bench.engine import Effort
from pycoll.bench.plots import plot_comparison
from pycoll.bench.ranks import RankError
from pycoll.bench.tables import comparison_tables, legend
from pycoll.bench.units import parse_nbytes

# A file or a pipe has no width of its own.
WIDTH_WITHOUT_TERMINAL = 120


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(parse_nbytes(size) for size in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def world(text: str) -> tuple[int, tuple[int, ...]]:
    """ "4:8,64K" to (4, (8, 65536))."""
    number, colon, listed = text.partition(":")
    if not colon or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not RANKS:SIZE[,SIZE…], such as 4:8,64K")
    return int(number), sizes(listed)


def parser() -> OneLineParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--backends", type=names, default=("gloo", "pycoll"), help="the first is the yardstick")
    add("--ops", type=names, default=("all_reduce",), help=", ".join(OPS))
    add("-n", "--world-size", type=int, default=2, metavar="RANKS")
    add("--sizes", type=sizes, default=sizes("8,1K,64K,1M,16M,64M"), help="S in bytes, K, M or G")
    add(
        "--cases", type=world, action="append", metavar="RANKS:SIZES", help="instead of -n, --sizes"
    )
    add("--dtype", default="float32", help=", ".join(DTYPES))
    add("--async-op", action="store_true", help="async_op=True, waited for at once")
    add("--rounds", type=int, default=5)
    add("--repetition-seconds", type=float, default=0.05, help="length of a timed block")
    add("--repetitions", type=int, default=3, help="timed blocks in a round")
    add("--fresh-ranks", action="store_true", help="new processes in every round")
    add("--timeout", type=float, default=120.0, help="seconds that one measurement may take")
    add("--json", type=Path, metavar="FILE", help="where to write the result")
    add("--plots", type=Path, metavar="FOLDER", help="where to write a PNG for each table")
    return parser


def plan(arguments: argparse.Namespace) -> Plan:
    """Raises ValueError for what torch, the engine or the formulas cannot do."""
    worlds = []
    for world_size, nbytes in arguments.cases or [(arguments.world_size, arguments.sizes)]:
        choices = itertools.product(arguments.ops, nbytes)
        cases = [Case(op, size, arguments.dtype, arguments.async_op) for op, size in choices]
        worlds.append(World(world_size, tuple(cases)))
    return Plan(
        backends=arguments.backends,
        worlds=tuple(worlds),
        rounds=arguments.rounds,
        effort=Effort(
            repetitions=arguments.repetitions, repetition_seconds=arguments.repetition_seconds
        ),
        fresh_ranks=arguments.fresh_ranks,
        timeout=arguments.timeout,
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = (parsing := parser()).parse_args(argv)
    try:
        chosen = plan(arguments)
    except ValueError as error:
        parsing.error(str(error))
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task: TaskID = progress.add_task("starting ranks", total=None)

        def show(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        try:
            comparison = compare(chosen, show)
        except RankError as error:
            progress.stop()
            print(error, file=sys.stderr)
            return 1
    for table in comparison_tables(comparison, console.width):
        console.print(table)
    console.print(legend(comparison))
    if arguments.json:
        comparison.save(arguments.json)
        print(f"wrote {arguments.json}")
    if arguments.plots:
        for op, world_size in sorted({(row.op, row.world_size) for row in comparison.rows}):
            name = f"{op}_{world_size}_ranks.png"
            print(f"wrote {plot_comparison(comparison, op, world_size, arguments.plots / name)}")
    for line in comparison.failures:
        print(line, file=sys.stderr)
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    sys.exit(main())
