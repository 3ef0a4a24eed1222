"""Rows of text on a terminal: drawn by rich where it is installed, else in plain columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pycoll.bench.extras import has_rich
from pycoll.bench.report import aligned

NO_COLOURS: Mapping[str, str] = {}


def print_rows(
    rows: Sequence[Sequence[str]],
    header: Sequence[str] = (),
    colours: Mapping[str, str] = NO_COLOURS,
) -> None:
    """Args:
    header: names of columns; empty: none are shown.
    colours: of cells that hold just this text.
    """
    if not has_rich():
        print("\n".join(aligned([header, *rows] if header else rows)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, show_header=bool(header), box=None)
    for row in rows:
        table.add_row(*(Text(cell, style=colours.get(cell, "")) for cell in row))
    Console().print(table)
