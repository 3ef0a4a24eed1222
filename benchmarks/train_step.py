"""Times training steps: torch's DistributedDataParallel and FSDP2 over gloo and over pycoll, and pycoll's own
DistributedDataParallel, in turns.

    python benchmarks/train_step.py -n 2 --rounds 5 --json benchmarks/results/train_step.json

A step is forward, backward, optimizer. Models: wide (communication decides), layers (balanced), dense (computing
decides), many (2,000 small parameters). "exposed" is the time by which communication lengthens a step: against
`no_sync` for DDP, against the bare model for FSDP2. Exit code: 0; 1 if ranks failed; 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pycoll.bench.results import machine_facts
from pycoll.bench.units import format_seconds
from pycoll.bench.wrappers import MODELS, Contender, StepTimes, compare_wrappers
from pycoll.testing import RankError

CONTENDERS = (
    Contender("torch", "gloo"),
    Contender("torch", "pycoll"),
    Contender("pycoll", "pycoll"),
    Contender("fsdp2", "gloo"),
    Contender("fsdp2", "pycoll"),
)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("-n", "--world-size", type=int, default=2, metavar="RANKS")
    add("--models", default="wide,layers,dense", help=f"of {', '.join(MODELS)}")
    add("--rounds", type=int, default=5)
    add("--pairs", type=int, default=10, help="steps with and without synchronisation in a round")
    add("--views", action="store_true", help="gradient_as_bucket_view=True")
    add("--json", type=Path, metavar="FILE", help="where to write the result")
    return parser


def table_of(model: str, world_size: int, times: Sequence[StepTimes]) -> Table:
    table = Table(title=f"{model}, {world_size} ranks")
    table.add_column("", no_wrap=True)
    for name in ("step", "without sync", "exposed", "times as fast as over gloo"):
        table.add_column(name, justify="right")
    for each in times:
        low, high = min(each.ratios), max(each.ratios)
        table.add_row(
            str(each.contender),
            *(format_seconds(s) for s in (each.with_sync, each.without_sync)),
            f"{each.exposed * 1e3:.2f} ms",
            f"{statistics.median(each.ratios):.2f} ({low:.2f}–{high:.2f})",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    arguments = (parsing := parser()).parse_args(argv)
    console, result = Console(), {"facts": machine_facts(), "models": {}}
    for model in arguments.models.split(","):
        try:
            times = compare_wrappers(
                CONTENDERS,
                model,
                world_size=arguments.world_size,
                rounds=arguments.rounds,
                pairs=arguments.pairs,
                gradient_as_bucket_view=arguments.views,
            )
        except ValueError as error:
            parsing.error(str(error))
        except RankError as error:
            print(error, file=sys.stderr)
            return 1
        console.print(table_of(model, arguments.world_size, times))
        result["models"][model] = [asdict(each) for each in times]
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
