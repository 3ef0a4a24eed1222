"""Comparisons as tables for a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pycoll.bench.cases import REDUCING
from pycoll.bench.formulas import SIZE_MEANING
from pycoll.bench.results import Comparison, Row
from pycoll.bench.units import format_gbps, format_nbytes, format_seconds

# Two backends with all columns are about so wide; without p99 and spread they fit 80 characters.
DETAILED_WIDTH = 100
# More backends than these have a line each.
MOST_SIDE_BY_SIDE = 2
# With algorithm bandwidth and the limit they are wider.
WIDE_WIDTH = 150


def comparison_tables(comparison: Comparison, width: int = DETAILED_WIDTH) -> list[Group]:
    """A table for each collective, place and number of ranks, with a heading that says what S is: a
    line a size, a group of columns a backend; or, with many backends, a line each. In a narrow
    terminal p99, algorithm bandwidth and the ratios' spread are left out.
    """
    tables = []
    for _, rows in groupby(comparison.rows, key=_heading):
        listed = list(rows)
        shows = _Shown(
            details=width >= DETAILED_WIDTH,
            wide=width >= WIDE_WIDTH,
            limit=any(row.limit for row in listed),
            choice=any(map(_choice, listed)),
        )
        if len(comparison.backends) > MOST_SIDE_BY_SIDE:
            tables.append(Group(_title(listed[0], comparison), _long_table(comparison, listed)))
            continue
        table = Table()
        _add_columns(table, comparison.backends, shows)
        for _, row_group in groupby(listed, key=lambda row: row.nbytes):
            table.add_row(*_cells(comparison, list(row_group), shows))
        tables.append(Group(_title(listed[0], comparison), table))
    return tables


@dataclass(frozen=True)
class _Shown:
    """Which columns there are."""

    details: bool
    wide: bool
    limit: bool
    choice: bool


def _title(row: Row, comparison: Comparison) -> Text:
    how = ", async_op=True and waited for at once" if row.async_op else ""
    op = f" {row.reduce_op}" if row.op in REDUCING else ""
    place = "" if row.op == "barrier" else ", in place" if row.place == "in" else ", out of place"
    link = f", over {comparison.facts['link']}" if "link" in comparison.facts else ""
    title = Text(
        f"{row.op}{op}{place}, {row.world_size} ranks, {row.dtype}{link}{how}", style="bold"
    )
    return title.append(f"\nS: bytes of {SIZE_MEANING[row.op]}", style="not bold")


def _choice(row: Row) -> str:
    """Algorithm and memory path, where the library says."""
    return "/".join(part for part in (row.algorithm, row.memory_path) if part)


def legend(comparison: Comparison) -> str:
    """What the columns mean, in one line."""
    rounds = comparison.facts.get("rounds", "?")
    return (
        f"Medians of {rounds} rounds, slowest rank; p99 of calls timed "
        "one by one; algbw and busbw in GB/s (1e9 bytes); ×: times as fast (lowest–highest round); "
        "limit: the loop over memory that all ranks map, in the same run, and ÷: time over it; "
        "wrong: elements."
    )


def _heading(row: Row) -> tuple[object, ...]:
    return row.case[:-1]


def _long_table(comparison: Comparison, rows: list[Row]) -> Table:
    """A line a size and backend, a section a size."""
    table = Table()
    first = comparison.backends[0]
    for name in ("S", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for name in ("time", "p99", "algbw", "busbw", "÷ limit", f"× {escape(first)}"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    table.add_column("wrong", justify="right", no_wrap=True)
    for _, row_group in groupby(rows, key=lambda row: row.nbytes):
        for position, row in enumerate(row_group):
            measured = bool(row.samples)
            ratio = comparison.ratio(row)
            spread = f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})" if ratio else "–"
            table.add_row(
                "" if position else format_nbytes(row.nbytes),
                format_seconds(row.limit) if row.limit and not position else "",
                escape(row.backend),
                format_seconds(row.seconds) if measured else "–",
                "–" if row.p99 is None else format_seconds(row.p99),
                format_gbps(row.algorithm_bandwidth) if measured else "–",
                format_gbps(row.bus_bandwidth) if measured else "–",
                f"{row.over_limit:.2f}" if row.over_limit else "–",
                spread,
                escape(_choice(row)) or "–",
                _verdict([row]),
            )
        table.add_section()
    return table


def _add_columns(table: Table, backends: tuple[str, ...], shows: _Shown) -> None:
    table.add_column("S", justify="right", no_wrap=True)
    if shows.limit:
        table.add_column("limit", justify="right", no_wrap=True)
    for position, backend in enumerate(map(escape, backends)):
        style = "bold" if position else ""
        table.add_column(f"{backend}\ntime", justify="right", style=style, no_wrap=True)
        if shows.details:
            table.add_column("\np99", justify="right", no_wrap=True)
        if shows.wide:
            table.add_column("\nalgbw", justify="right", no_wrap=True)
        table.add_column("\nbusbw", justify="right", no_wrap=True)
        if shows.limit:
            table.add_column("÷", justify="right", no_wrap=True)
        if position:
            table.add_column(
                f"× {escape(backends[0])}", justify="right", style="bold", no_wrap=True
            )
    if shows.choice:
        table.add_column("algorithm", no_wrap=True)
    table.add_column("wrong", justify="right", no_wrap=True)


def _cells(comparison: Comparison, rows: list[Row], shows: _Shown) -> list[str]:
    """The line of one size; `rows` are in the order of the backends."""
    cells = [format_nbytes(rows[0].nbytes)]
    if shows.limit:
        cells.append(format_seconds(rows[0].limit) if rows[0].limit else "–")
    for position, row in enumerate(rows):
        measured = bool(row.samples)
        cells.append(format_seconds(row.seconds) if measured else "–")
        if shows.details:
            cells.append("–" if row.p99 is None else format_seconds(row.p99))
        if shows.wide:
            cells.append(format_gbps(row.algorithm_bandwidth) if measured else "–")
        cells.append(format_gbps(row.bus_bandwidth) if measured else "–")
        if shows.limit:
            cells.append(f"{row.over_limit:.2f}" if row.over_limit else "–")
        if position:
            ratio = comparison.ratio(row)
            spread = f" ({ratio.low:.2f}–{ratio.high:.2f})" if ratio and shows.details else ""
            cells.append(f"{ratio.median:.2f}{spread}" if ratio else "–")
    if shows.choice:
        cells.append(escape(next(filter(None, map(_choice, rows)), "–")))
    return [*cells, _verdict(rows)]


def _verdict(rows: list[Row]) -> str:
    """The cell that says whether results were right."""
    counts = [row.wrong for row in rows if row.wrong is not None]
    if any(counts):
        return f"[red]{max(counts)}[/]"
    if any(row.error is not None for row in rows):
        return "refused"
    return "0" if counts else "–"
