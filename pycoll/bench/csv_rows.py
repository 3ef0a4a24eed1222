"""Comparisons as CSV: a line a case and backend, times in microseconds, bandwidths in GB/s (1e9 bytes)."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pycoll.bench.results import Comparison, Row

_Value = str | int | float | None
# Name, how it is read back, and where it comes from.
_COLUMNS: tuple[tuple[str, Callable[[str], Any], Callable[[Row], _Value]], ...] = (
    ("op", str, lambda row: row.op),
    ("place", str, lambda row: row.place),
    ("reduce_op", str, lambda row: row.reduce_op),
    ("dtype", str, lambda row: row.dtype),
    ("device", str, lambda row: row.device),
    ("ranks", int, lambda row: row.world_size),
    ("backend", str, lambda row: row.backend),
    ("bytes", int, lambda row: row.nbytes),
    ("time_us", float, lambda row: row.seconds * 1e6 if row.samples else None),
    ("p50_us", float, lambda row: row.p50 * 1e6 if row.samples else None),
    ("p99_us", float, lambda row: None if row.p99 is None else row.p99 * 1e6),
    ("algbw_GBps", float, lambda row: row.algorithm_bandwidth if row.samples else None),
    ("busbw_GBps", float, lambda row: row.bus_bandwidth if row.samples else None),
    ("limit_us", float, lambda row: None if row.limit is None else row.limit * 1e6),
    ("over_limit", float, lambda row: row.over_limit),
    ("algorithm", str, lambda row: row.algorithm),
    ("memory_path", str, lambda row: row.memory_path),
    ("wrong", int, lambda row: row.wrong),
    ("rounds", int, lambda row: len(row.samples)),
    ("error", str, lambda row: row.error),
)
HEADER = tuple(name for name, _, _ in _COLUMNS)


def records(comparison: Comparison) -> list[dict[str, _Value]]:
    """A dict a row; None where there is no figure."""
    return [{name: get(row) for name, _, get in _COLUMNS} for row in comparison.rows]


def write_csv(comparison: Comparison, path: Path) -> None:
    """Writes the file, making the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, HEADER, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records(comparison))


def read_csv(path: Path) -> list[dict[str, _Value]]:
    """What `records` gave.

    Raises:
        ValueError: the columns are others.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != HEADER:
            raise ValueError(f"{path} has the columns {reader.fieldnames}, not {list(HEADER)}")
        return [
            {name: read(line[name]) if line[name] != "" else None for name, read, _ in _COLUMNS}
            for line in reader
        ]
