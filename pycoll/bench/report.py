"""What a run shows: progress, tables and complaints; drawn with rich where that is installed, else as plain text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pycoll.bench.compare import Progress
from pycoll.bench.csv_rows import records
from pycoll.bench.extras import has_rich
from pycoll.bench.results import Comparison
from pycoll.bench.units import format_nbytes

if TYPE_CHECKING:
    from pycoll.bench.models import CostModel

# A file or a pipe has no width of its own.
WIDTH_WITHOUT_TERMINAL = 160
_PLAIN = (
    "op",
    "place",
    "dtype",
    "ranks",
    "backend",
    "bytes",
    "time_us",
    "algbw_GBps",
    "busbw_GBps",
    "p99_us",
    "limit_us",
    "over_limit",
    "algorithm",
    "memory_path",
    "wrong",
)


class Reporter:
    """Args:
    quiet: print nothing (ranks that are not the first).
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._console: Any = None
        if has_rich():
            from rich.console import Console

            self._console = Console()
            if not self._console.is_terminal:
                self._console.width = WIDTH_WITHOUT_TERMINAL

    def line(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)

    def complaint(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A bar on stderr; gives the function that moves it. Plain text has none."""
        if self._quiet or self._console is None:
            yield lambda done, total, what: None
            return
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting ranks", total=None)

            def show(done: int, total: int, what: str) -> None:
                bar.update(task, completed=done, total=total, description=what)

            yield show

    def comparison(self, comparison: Comparison) -> None:
        """Tables of all rows."""
        if self._quiet:
            return
        if self._console is None:
            print("\n".join(plain_lines(comparison)))
            return
        from pycoll.bench.tables import comparison_tables, legend

        for table in comparison_tables(comparison, self._console.width):
            self._console.print(table)
        self._console.print(legend(comparison))

    def models(self, models: Sequence[CostModel]) -> None:
        """A line a piece."""
        for model in models:
            of = model.of
            name = f"{of['op']} {of['place']} n={of['world_size']} {of['backend']} {of['algorithm']} {of['load']}"
            slow = f", {model.slowdown:.2f} x the idle time" if model.slowdown else ""
            self.line(f"{name}{slow}")
            for piece in model.model.pieces:
                alpha, beta = piece.alpha, piece.beta
                self.line(
                    f"  {format_nbytes(piece.begin)} to {format_nbytes(piece.end)}: "
                    f"α {alpha.value * 1e6:.2f} µs ({alpha.low * 1e6:.2f} to {alpha.high * 1e6:.2f}), "
                    f"β {beta.value * 1e9:.4f} ns/B ({beta.low * 1e9:.4f} to {beta.high * 1e9:.4f}), "
                    f"residual {piece.residual:.1%}"
                )


def plain_lines(comparison: Comparison) -> list[str]:
    """The table in columns of text, for terminals without rich."""
    cells = [list(_PLAIN)]
    for record in records(comparison):
        cells.append([_plain_cell(record[name]) for name in _PLAIN])
    lines = aligned(cells, to_the_right=True)
    return [*lines, f"link: {comparison.facts.get('link', 'unknown')}"]


def aligned(rows: Sequence[Sequence[str]], to_the_right: bool = False) -> list[str]:
    """A line for each row; rows are equally long."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    place = str.rjust if to_the_right else str.ljust
    return ["  ".join(map(place, row, widths)).rstrip() for row in rows]


def _plain_cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
