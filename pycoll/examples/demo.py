"""The demonstration: one training job on each backend and in one process, then the collectives.

    python -m pycoll.examples.demo

1. trains the GPT of `train_gpt` on 2 ranks over each backend (with pycoll's DistributedDataParallel
   over pycoll, torch's over others), and in one process on the joined batch, and checks that all losses agree;
2. times all_reduce from 8 B to 64 MiB on the backends in turn;
3. writes plots of both and prints a summary.

Exit code: 0; 1 if losses disagree, a sum is wrong or a child fails; 2 for bad arguments; 130 after
Ctrl-C, which ends the children first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pycoll.bench.cases import Case
from pycoll.bench.compare import Plan, World, compare
from pycoll.bench.engine import Effort
from pycoll.bench.peers import check_backend
from pycoll.bench.plots import plot_agreement, plot_comparison
from pycoll.bench.ranks import RankError
from pycoll.bench.results import Comparison, machine_facts
from pycoll.bench.tables import comparison_tables, legend
from pycoll.examples.gpt import PRESETS
from pycoll.examples.train_gpt import LOSS_TOLERANCE

ONE_PROCESS = "one process"
BATCH_SIZE = 8
YARDSTICK = "gloo"
SIZES = (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20)
# Shorter blocks than a benchmark's: the demonstration has to fit into a coffee break.
EFFORT = Effort(warmup_calls=2, repetitions=3, repetition_seconds=0.04)
SECONDS_TO_END = 20.0
WIDTH_WITHOUT_TERMINAL = 110


class DemoError(RuntimeError):
    """A part of the demonstration failed; the message is for people."""


@dataclass(frozen=True)
class Training:
    """A run of `train_gpt`: its JSON result, and its losses' largest difference from one process."""

    name: str
    result: dict[str, Any]
    largest_difference: float

    @property
    def share(self) -> str:
        communication = self.result["communication"]
        return f"{communication['share']:.1%}" if communication else "–"


def run_child(command: Sequence[str]) -> int:
    """Runs a child of this process to its end and returns its exit code.

    Should this process be interrupted, the child is asked to end (torchrun then ends its ranks),
    and killed if it does not. It has a session of its own, so that Ctrl-C reaches it in no other
    way.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with subprocess.Popen(command, start_new_session=True, env=environment) as child:
        try:
            return child.wait()
        except BaseException:
            child.terminate()
            try:
                child.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                child.kill()
            raise


def run_training(backend: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """Trains over `backend`, or in one process if it is None, and returns the JSON result.

    Raises:
        DemoError: if the training fails.
    """
    path = options.out / f"train_{backend or 'one_process'}.json"
    path.unlink(missing_ok=True)
    launcher = ["--standalone", "--nproc-per-node", str(options.ranks), "-m"]
    command = [sys.executable, "-m"]
    command += ["pycoll.examples.launch", *launcher] if backend else []
    command += ["pycoll.examples.train_gpt", "--json", str(path)]
    command += ["--backend", backend] if backend else ["--world-size", "1"]
    command += ["--steps", str(options.steps), "--model", options.model]
    command += ["--batch-size", str(BATCH_SIZE)]
    code = run_child(command)
    if code != 0 or not path.is_file():
        raise DemoError(f"training over {backend or ONE_PROCESS} failed with exit code {code}")
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def compare_losses(results: dict[str, dict[str, Any]]) -> list[Training]:
    """Holds every run against the one in one process, step by step.

    Raises:
        DemoError: if the runs did not read the same text or did not run the same steps.
    """
    reference = results[ONE_PROCESS]
    trainings = []
    for name, result in results.items():
        if result["corpus_sha256"] != reference["corpus_sha256"]:
            raise DemoError(f"{name} was trained on another text than {ONE_PROCESS}")
        pairs = zip(result["losses"], reference["losses"], strict=True)
        trainings.append(Training(name, result, max(abs(mine - one) for mine, one in pairs)))
    return trainings


def time_collectives(options: argparse.Namespace, console: Console) -> Comparison:
    """all_reduce on all backends in turn; gloo, if it takes part, is what ratios refer to."""
    ordered = sorted(options.backends, key=lambda backend: backend != YARDSTICK)
    cases = tuple(Case("all_reduce", nbytes) for nbytes in SIZES)
    plan = Plan(tuple(ordered), (World(options.ranks, cases),), options.rounds, EFFORT)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("starting ranks", total=None)

        def show(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        try:
            return compare(plan, show)
        except RankError as error:
            raise DemoError(str(error)) from None


def draw(
    trainings: Sequence[Training], comparison: Comparison, options: argparse.Namespace
) -> None:
    """Writes the plots and prints their paths."""
    by_name = {training.name: training.result["losses"] for training in trainings}
    # In the comparison's order: a backend has the same colour in both plots.
    losses = {name: by_name[name] for name in (*comparison.backends, ONE_PROCESS)}
    unit = "loss (nats a character)"
    paths = [
        plot_agreement(losses, ONE_PROCESS, LOSS_TOLERANCE, unit, options.out / "loss.png"),
        plot_comparison(comparison, "all_reduce", options.ranks, options.out / "all_reduce.png"),
    ]
    comparison.save(options.out / "all_reduce.json")
    for path in paths:
        print(f"wrote {path}")


def summary(trainings: Sequence[Training], options: argparse.Namespace) -> Table:
    """Speed, share of communication and loss of each run."""
    table = Table(title=f"GPT, {options.steps} steps", title_justify="left")
    columns = ("run", "ranks", "tokens/s", "communication", "perplexity", "largest loss difference")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left")
    for training in trainings:
        result = training.result
        after = f"{result['perplexity']['before']:.1f} → {result['perplexity']['after']:.2f}"
        alone = training.name == ONE_PROCESS
        table.add_row(
            training.name,
            str(result["world_size"]),
            f"{result['tokens_per_second']:,.0f}",
            training.share,
            after,
            "–" if alone else f"{training.largest_difference:.1e}",
        )
    return table


def demonstrate(options: argparse.Namespace) -> int:
    """Runs all parts; returns the exit code. Raises DemoError if a part cannot be finished."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    facts = machine_facts()
    print(f"{facts['cpu']}, {facts['usable_cores']} usable cores, torch {facts['torch']}\n")
    results = {}
    for backend in (*options.backends, None):
        results[backend or ONE_PROCESS] = run_training(backend, options)
        print(flush=True)
    trainings = compare_losses(results)
    largest = max(training.largest_difference for training in trainings)
    agree = largest <= LOSS_TOLERANCE
    print(
        f"losses {'agree' if agree else 'DISAGREE'}: over {options.steps} steps the largest "
        f"difference from one process is {largest:.1e} nats (tolerance {LOSS_TOLERANCE:g})\n"
    )
    comparison = time_collectives(options, Console(stderr=True))
    for table in comparison_tables(comparison, console.width):
        console.print(table)
    console.print(legend(comparison), "\n")
    draw(trainings, comparison, options)
    console.print()
    console.print(summary(trainings, options))
    for line in comparison.failures:
        print(line, file=sys.stderr)
    return 0 if agree and not comparison.failures else 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = _Parser(
        prog="demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backends", default="pycoll,gloo", help="separated by commas")
    add("--ranks", type=int, default=2)
    add("--steps", type=int, default=300, help="of training")
    add("--model", choices=sorted(PRESETS), default="small")
    add("--rounds", type=int, default=3, help="of the comparison of collectives")
    add("--out", type=Path, default=Path("demo_out"), help="folder for results and plots")
    options = parser.parse_args(argv)
    options.backends = [name.strip() for name in options.backends.split(",")]
    try:
        for backend in options.backends:
            check_backend(backend)
        for name in ("ranks", "steps", "rounds"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} must be positive, got {getattr(options, name)}")
        if BATCH_SIZE % options.ranks:
            raise ValueError(f"--ranks {options.ranks} does not divide a batch of {BATCH_SIZE}")
        options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return options


def _interrupt(signal_number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    start = time.monotonic()
    try:
        code = demonstrate(options)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    print(f"\n{'done' if code == 0 else 'FAILED'} in {time.monotonic() - start:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
