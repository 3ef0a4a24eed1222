"""`pycoll bench`: what the parsed arguments ask for, one function each."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pycoll.bench import torchrun
from pycoll.bench.arguments import plan_of
from pycoll.bench.compare import Plan, Start, compare
from pycoll.bench.csv_rows import write_csv
from pycoll.bench.extras import MissingExtra, need
from pycoll.bench.history import Verdict, changes, plan_again, regressions, summary
from pycoll.bench.peers import Peer, check_peer, why_skipped
from pycoll.bench.ranks import RankError
from pycoll.bench.report import Reporter
from pycoll.bench.results import Comparison
from pycoll.cli.run import check_writable

COMPARE_MARGIN = 0.1
VERIFY_MARGIN = 0.5


def run_bench(arguments: argparse.Namespace, fail: Callable[[str], None]) -> int:
    """Returns the exit code.

    Args:
        arguments: of `pycoll.bench.arguments.add_arguments`.
        fail: ends the program with a message about its arguments.
    """
    try:
        if arguments.compare:
            return _compare_files(arguments)
        if arguments.plot:
            need("matplotlib.figure", "--plot")
        if arguments.fit:
            need("scipy.stats", "--fit")
        for name in ("json", "csv", "plot", "fit"):
            check_writable(f"--{name}", getattr(arguments, name))
        return _verify(arguments) if arguments.verify else _measure(arguments)
    except (ValueError, OSError, MissingExtra) as error:
        fail(str(error))
        raise
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        torchrun.leave()


def _measure(arguments: argparse.Namespace) -> int:
    started = torchrun.world_size_here()
    if started is not None:
        arguments.ranks = (started,)
        plan_of(arguments)  # bad arguments are told before anything is joined
        torchrun.join(arguments.timeout)
    reporter = Reporter(quiet=not torchrun.is_first())
    plan = _available(plan_of(arguments), reporter, started is not None)
    if not plan.backends:
        return 1
    start: Start | None = torchrun.JoinedGroup if started is not None else None
    if started is not None and not torchrun.is_first():
        plan = replace(plan, limits=False)  # one rank measures it for all
    if arguments.fit:
        return _fit(plan, reporter, start, arguments.fit)
    with reporter.progress() as show:
        comparison = compare(plan, show, start)
    return _report(comparison, reporter, arguments)


def _available(plan: Plan, reporter: Reporter, joined: bool) -> Plan:
    """The plan without backends that cannot be measured here, each with a plain line."""
    most_ranks = max(world.world_size for world in plan.worlds)
    kept = []
    for name in plan.backends:
        peer = Peer.parse(name)
        why = why_skipped(peer, most_ranks, plan.device)
        if joined and why is None:
            why = torchrun.why_not(peer)
        if why is None:
            kept.append(name)
        else:
            reporter.line(f"{name}: skipped: {why}")
    return replace(plan, backends=tuple(kept)) if kept else _without_backends(plan)


def _without_backends(plan: Plan) -> Plan:
    empty = replace(plan)
    object.__setattr__(empty, "backends", ())
    return empty


def _report(comparison: Comparison, reporter: Reporter, arguments: argparse.Namespace) -> int:
    reporter.comparison(comparison)
    if torchrun.is_first():
        if arguments.json:
            comparison.save(arguments.json)
            reporter.line(f"wrote {arguments.json}")
        if arguments.csv:
            write_csv(comparison, arguments.csv)
            reporter.line(f"wrote {arguments.csv}")
        if arguments.plot:
            for path in _plots(comparison, arguments.plot):
                reporter.line(f"wrote {path}")
    for line in comparison.failures:
        reporter.complaint(line)
    return 1 if comparison.failures else 0


def _plots(comparison: Comparison, path: Path) -> list[Path]:
    """One file for each collective, place and number of ranks; the first keeps the given name if it is the only one."""
    from pycoll.bench.plots import plot_comparison

    kinds = list(
        dict.fromkeys(
            (row.op, row.world_size, row.place)
            for row in comparison.rows
            if row.samples and row.op != "barrier"
        )
    )
    written = []
    for op, world_size, place in kinds:
        name = path.name if len(kinds) == 1 else f"{path.stem}_{op}_{place}_{world_size}.png"
        target = path.with_name(name)
        written.append(plot_comparison(comparison, op, world_size, target, place))
    return written


def _fit(plan: Plan, reporter: Reporter, start: Start | None, path: Path) -> int:
    from pycoll.bench.fit import save_fits
    from pycoll.bench.models import measure_models

    with reporter.progress() as show:
        models, facts = measure_models(plan, show, start)
    reporter.models(models)
    if torchrun.is_first():
        save_fits(path, facts, [model.entry() for model in models])
        reporter.line(f"wrote {path}")
    return 0


def _read(path: Path) -> Comparison:
    try:
        return Comparison.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is no result of pycoll bench --json ({type(error).__name__}: {error}); "
            "measure it anew"
        ) from None


def _compare_files(arguments: argparse.Namespace) -> int:
    old, new = map(_read, arguments.compare)
    margin = COMPARE_MARGIN if arguments.margin is None else arguments.margin
    listed = changes(old, new, margin)
    for change in listed:
        print(change.line())
    print(summary(listed))
    return 1 if any(change.verdict is Verdict.SLOWER for change in listed) else 0


def _verify(arguments: argparse.Namespace) -> int:
    stored = _read(arguments.verify)
    margin = VERIFY_MARGIN if arguments.margin is None else arguments.margin
    plan = plan_again(stored, rounds=arguments.rounds)
    for name in plan.backends:
        why = why_skipped(check_peer(name, plan.device), 1, plan.device)
        if why is not None:
            raise ValueError(f"--verify {arguments.verify} needs {name}: {why}")
    reporter = Reporter()
    with reporter.progress() as show:
        again = compare(plan, show)
    reporter.comparison(again)
    lines = regressions(stored, again, margin)
    for line in lines:
        reporter.complaint(line)
    if not lines:
        reporter.line(f"no ratio is below {arguments.verify} by more than {margin:.0%}")
    return 1 if lines else 0
