"""`pycoll tune-collectives`: measures where one algorithm becomes quicker than another, and stores the table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from pycoll import tuning
from pycoll.bench.arguments import numbers, size, steps
from pycoll.bench.cases import DTYPES
from pycoll.bench.engine import Effort
from pycoll.bench.ranks import RankError
from pycoll.bench.report import Reporter
from pycoll.bench.tune import measure_table, tunable
from pycoll.cli.run import check_writable

DESCRIPTION = """\
Measures every collective that has several algorithms with each of them, interleaved, and stores which one this machine
runs quickest up to which size. Groups made from then on use the table (PYCOLL_TUNING=off: they do not). Algorithms that
give up the fixed order of additions are left out, so results keep their bits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the arguments of `pycoll tune-collectives`."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("-n", "--ranks", type=numbers, default=(2,), metavar="N,…", help="numbers of ranks (2)")
    add("-b", "--begin", type=size, default=256, metavar="SIZE", help="smallest S (256)")
    add("-e", "--end", type=size, default=4 << 20, metavar="SIZE", help="largest S (4M)")
    add("-f", "--factor", type=float, default=2.0, help="from one size to the next (2)")
    add("-d", "--dtype", default="float32", help=", ".join(DTYPES))
    add("--rounds", type=int, default=5)
    add("--repetition-seconds", type=float, default=0.03, help="length of a timed block (0.03)")
    add("--output", type=Path, metavar="FILE", help=f"default: {tuning.default_path()}")
    add("--dry-run", action="store_true", help="print the table, store nothing")


def run_tune(arguments: argparse.Namespace, fail: Callable[[str], None]) -> int:
    """Returns the exit code; `fail` ends the program with a message about its arguments."""
    reporter = Reporter()
    try:
        path = arguments.output or tuning.default_path()
        if not arguments.dry_run:
            check_writable("--output", path)
        sizes = steps(arguments.begin, arguments.end, arguments.factor)
        for ranks in arguments.ranks:
            if ranks < 2:
                raise ValueError(
                    f"--ranks has {ranks}, but one rank has nothing to choose: give 2 or more"
                )
        reporter.line(f"measuring {', '.join(tunable())}")
        with reporter.progress() as show:
            rows, measured = measure_table(
                arguments.ranks,
                sizes,
                dtype=arguments.dtype,
                rounds=arguments.rounds,
                effort=Effort(repetition_seconds=arguments.repetition_seconds),
                on_progress=show,
            )
    except ValueError as error:
        fail(str(error))
        raise
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    for row in rows:
        reporter.line(str(row))
    if not arguments.dry_run:
        tuning.save(rows, path, measured_at=measured[0].facts["measured_at"], sizes=list(sizes))
        reporter.line(f"wrote {path}")
    return 0
