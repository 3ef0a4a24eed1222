"""What memory costs: time of allocations with and without the shared allocator, and bytes of a process group.

    chrt --rr 10 python benchmarks/memory.py --json benchmarks/results/memory.json

Allocations: a tensor that is dropped at once, and one that is filled as well. Groups: the growth of the processes'
proportional set size for each of several groups of two ranks that have run an all_reduce. Exit code: 0; 1 if ranks
failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.utils.benchmark import Timer

import pycoll
from pycoll.bench.results import machine_facts
from pycoll.bench.units import format_nbytes, format_seconds
from pycoll.testing import RankError, run_ranks

SIZES = (16, 4096, 65536, 1 << 20, 16 << 20, 64 << 20)
STATEMENTS = {
    "empty": "torch.empty(n, dtype=torch.uint8)",
    "filled": "torch.empty(n, dtype=torch.uint8).fill_(1)",
}
GROUPS, WARMUP_GROUPS, NUMEL = 20, 4, 1 << 20


def time_allocations() -> dict[str, dict[str, list[float]]]:
    """Median seconds by statement and allocator, for each of `SIZES`."""
    times: dict[str, dict[str, list[float]]] = {
        name: {"torch": [], "shared": []} for name in STATEMENTS
    }
    for name, statement in STATEMENTS.items():
        for nbytes in SIZES:
            timer = Timer(statement, globals={"torch": torch, "n": nbytes})
            times[name]["torch"].append(timer.blocked_autorange(min_run_time=0.3).median)
            with pycoll.shared_allocator():
                times[name]["shared"].append(timer.blocked_autorange(min_run_time=0.3).median)
    return times


def proportional_set_size() -> int:
    """Bytes of this process; memory that several share counts in parts."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup has no line Pss")


def weigh_groups() -> float:
    """Bytes that a group costs on this rank."""
    tensor, kept = torch.zeros(NUMEL), []
    for number in range(WARMUP_GROUPS + GROUPS):
        if number == WARMUP_GROUPS:
            dist.barrier()
            before = proportional_set_size()
        kept.append(dist.new_group(backend="pycoll"))
        dist.all_reduce(tensor, group=kept[-1])
    dist.barrier()
    return (proportional_set_size() - before) / GROUPS


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    times = time_allocations()
    table = Table(title="allocations")
    table.add_column("size", justify="right")
    for name in STATEMENTS:
        for allocator in ("torch", "shared"):
            table.add_column(f"{name}, {allocator}", justify="right")
    for i, nbytes in enumerate(SIZES):
        cells = [format_seconds(times[name][a][i]) for name in times for a in times[name]]
        table.add_row(format_nbytes(nbytes), *cells)
    Console().print(table)
    try:
        weights = run_ranks(weigh_groups, 2, backend="pycoll")
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"a group of 2: {sum(weights) / 1024:.0f} KiB in both processes")
    if arguments.json:
        record = {
            "facts": machine_facts(),
            "sizes": SIZES,
            "seconds": times,
            "group_bytes": weights,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
