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

# Two backends with all columns are about so wide; without p99 and spread they fit 80 characters.
DETAILED_WIDTH = 100


def comparison_tables(comparison: Comparison, width: int = DETAILED_WIDTH) -> list[Group]:
    """A table for each collective and number of ranks, with a heading that says what S is: a line a
    size, a group of columns a backend. Below `DETAILED_WIDTH` characters p99 and the ratios' spread
    are left out.
    """
    detailed = width >= DETAILED_WIDTH
    tables = []
    for (op, world_size, dtype, async_op), rows in groupby(comparison.rows, key=_heading):
        how = ", async_op=True and waited for at once" if async_op else ""
        heading = Text(f"{op}, {world_size} ranks, {dtype}{how}", style="bold")
        heading.append(f"\nS: bytes of {SIZE_MEANING[op]}", style="not bold")
        table = Table()
        _add_columns(table, comparison.backends, detailed)
        for _, row_group in groupby(rows, key=lambda row: row.nbytes):
            table.add_row(*_cells(comparison, list(row_group), detailed))
        tables.append(Group(heading, table))
    return tables


def legend(comparison: Comparison) -> str:
    """What the columns mean, in one line."""
    rounds = comparison.facts.get("rounds", "?")
    return (
        f"Medians of {rounds} rounds, slowest rank; p99 of calls timed "
        "one by one; busbw in GB/s (1e9 bytes); ×: times as fast (lowest–highest round); wrong: "
        "elements."
    )


def _heading(row: Row) -> tuple[str, int, str, bool]:
    return row.op, row.world_size, row.dtype, row.async_op


def _add_columns(table: Table, backends: tuple[str, ...], detailed: bool) -> None:
    table.add_column("S", justify="right", no_wrap=True)
    for position, backend in enumerate(map(escape, backends)):
        style = "bold" if position else ""
        table.add_column(f"{backend}\ntime", justify="right", style=style, no_wrap=True)
        if detailed:
            table.add_column("\np99", justify="right", no_wrap=True)
        table.add_column("\nbusbw", justify="right", no_wrap=True)
        if position:
            table.add_column(
                f"× {escape(backends[0])}", justify="right", style="bold", no_wrap=True
            )
    table.add_column("wrong", justify="right", no_wrap=True)


def _cells(comparison: Comparison, rows: list[Row], detailed: bool) -> list[str]:
    """The line of one size; `rows` are in the order of the backends."""
    cells = [format_nbytes(rows[0].nbytes)]
    for position, row in enumerate(rows):
        measured = bool(row.samples)
        cells.append(format_seconds(row.seconds) if measured else "–")
        if detailed:
            cells.append("–" if row.p99 is None else format_seconds(row.p99))
        cells.append(format_gbps(row.bus_bandwidth) if measured else "–")
        if position:
            ratio = comparison.ratio(row)
            spread = f" ({ratio.low:.2f}–{ratio.high:.2f})" if ratio and detailed else ""
            cells.append(f"{ratio.median:.2f}{spread}" if ratio else "–")
    wrong = max(row.wrong for row in rows)
    refused = any(row.error is not None for row in rows)
    cells.append(f"[red]{wrong}[/]" if wrong else "refused" if refused else "0")
    return cells
