"""Comparisons as pictures: latency and bus bandwidth over size, a line a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from pycoll.bench.results import Comparison, Row
from pycoll.bench.units import format_gbps, format_nbytes, format_seconds

# Okabe and Ito's colours, which stay apart for colour-blind readers, and a marker each, which stay
# apart in print.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"))


def plot_comparison(comparison: Comparison, op: str, world_size: int, path: Path) -> Path:
    """Writes a PNG with two log-log panels, time a call and bus bandwidth, and returns its path.

    Raises:
        ValueError: if nothing was measured for this collective and number of ranks.
    """
    rows = [
        row
        for row in comparison.rows
        if row.op == op and row.world_size == world_size and row.samples
    ]
    if not rows:
        raise ValueError(f"nothing was measured for {op} on {world_size} ranks")
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    latency, bandwidth = figure.subplots(1, 2)
    for backend, (colour, marker) in zip(comparison.backends, cycle(STYLES), strict=False):
        mine = [row for row in rows if row.backend == backend]
        sizes = [row.nbytes for row in mine]
        for axes, values in (
            (latency, [row.seconds for row in mine]),
            (bandwidth, _bandwidths(mine)),
        ):
            axes.plot(
                sizes,
                values,
                color=colour,
                marker=marker,
                markersize=5,
                linewidth=1.8,
                label=backend,
            )
        low, high = ([edge(s.seconds for s in row.samples) for row in mine] for edge in (min, max))
        latency.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    _dress(latency, rows, "time a call (band: all rounds)", format_seconds)
    _dress(bandwidth, rows, "bus bandwidth", lambda value: f"{format_gbps(value)} GB/s")
    figure.suptitle(f"{op}, {world_size} ranks, {rows[0].dtype}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def plot_lines(
    series: Mapping[str, Sequence[float]], title: str, x_label: str, y_label: str, path: Path
) -> Path:
    """Writes a PNG of curves over their index, later ones thinner so that curves that coincide all
    show.
    """
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for position, (name, values) in enumerate(series.items()):
        colour = STYLES[position % len(STYLES)][0]
        width = 1.2 + 2.4 * (len(series) - 1 - position)
        axes.plot(range(1, len(values) + 1), values, color=colour, linewidth=width, label=name)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    _frame(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def _bandwidths(rows: Sequence[Row]) -> list[float]:
    return [row.bus_bandwidth for row in rows]


def _dress(
    axes: Axes, rows: Sequence[Row], y_label: str, formatted: Callable[[float], str]
) -> None:
    axes.set(xscale="log", yscale="log", xlabel="S", ylabel=y_label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row.nbytes for row in rows}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_nbytes(int(value))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=40)
    axes.yaxis.set_major_locator(LogLocator(base=10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formatted(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _frame(axes)


def _frame(axes: Axes) -> None:
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
