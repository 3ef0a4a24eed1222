"""Comparisons as tables for a terminal."""

from __future__ import annotations

from itertools import groupby

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pycoll.bench.formulas import SIZE_MEANING
from pycoll.bench.results import Comparison, Row
from pycoll.bench.units import format_gbps, format_nbytes, format_seconds


def comparison_tables(comparison: Comparison) -> list[Group]:
    """A table for each collective and number of ranks, with a heading that says what S is: a line a
    size, a group of columns a backend.
    """
    tables = []
    for (op, world_size, dtype, async_op), rows in groupby(comparison.rows, key=_heading):
        how = ", async_op=True and waited for at once" if async_op else ""
        heading = Text(f"{op}, {world_size} ranks, {dtype}{how}", style="bold")
        heading.append(f"\nS: bytes of {SIZE_MEANING[op]}", style="not bold")
        table = Table()
        _add_columns(table, comparison.backends)
        for _, row_group in groupby(rows, key=lambda row: row.nbytes):
            table.add_row(*_cells(comparison, list(row_group)))
        tables.append(Group(heading, table))
    return tables


def legend(comparison: Comparison) -> str:
    """What the columns mean, in one line."""
    return (
        f"Medians of {comparison.facts.get('rounds', '?')} rounds, slowest rank; p99 of calls timed "
        "one by one; busbw in GB/s (1e9 bytes); ×: times as fast (lowest–highest round); wrong: "
        "elements."
    )


def _heading(row: Row) -> tuple[str, int, str, bool]:
    return row.op, row.world_size, row.dtype, row.async_op


def _add_columns(table: Table, backends: tuple[str, ...]) -> None:
    table.add_column("S", justify="right", no_wrap=True)
    for position, backend in enumerate(map(escape, backends)):
        style = "bold" if position else ""
        table.add_column(f"{backend}\ntime", justify="right", style=style, no_wrap=True)
        table.add_column("\np99", justify="right", no_wrap=True)
        table.add_column("\nbusbw", justify="right", no_wrap=True)
        if position:
            table.add_column(
                f"× {escape(backends[0])}", justify="right", style="bold", no_wrap=True
            )
    table.add_column("wrong", justify="right", no_wrap=True)


def _cells(comparison: Comparison, rows: list[Row]) -> list[str]:
    """The line of one size; `rows` are in the order of the backends."""
    cells = [format_nbytes(rows[0].nbytes)]
    for position, row in enumerate(rows):
        if not row.samples:
            cells += ["–"] * (4 if position else 3)
            continue
        cells.append(format_seconds(row.seconds))
        cells.append("–" if row.p99 is None else format_seconds(row.p99))
        cells.append(format_gbps(row.bus_bandwidth))
        if position:
            ratio = comparison.ratio(row)
            cells.append(
                "–" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"
            )
    wrong = max(row.wrong for row in rows)
    cells.append(f"[red]{wrong}[/]" if wrong else "0")
    return cells
