"""Comparisons as pictures: latency and bus bandwidth over size, a line a backend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter, NullLocator

from pycoll.bench.formulas import GIGABYTE, bus_bandwidth
from pycoll.bench.results import Comparison, Row
from pycoll.bench.units import format_nbytes

# Okabe and Ito's colours, which stay apart for colour-blind readers, and a marker each, which stay
# apart in print.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"))


def plot_comparison(
    comparison: Comparison, op: str, world_size: int, path: Path, place: str | None = None
) -> Path:
    """Writes a PNG with two log-log panels, time a call and bus bandwidth, with a line a backend and
    one for the roofline where it was measured, and returns its path. `place`: "in" or "out", where
    there are both.

    Raises:
        ValueError: if nothing was measured for this collective and number of ranks.
    """
    rows = [
        row
        for row in comparison.rows
        if row.op == op
        and row.world_size == world_size
        and row.samples
        and place in (None, row.place)
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
            (bandwidth, [row.bus_bandwidth * GIGABYTE for row in mine]),
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
    _draw_limit(latency, bandwidth, rows)
    _dress(latency, rows, "time a call (band: all rounds)", "s")
    _dress(bandwidth, rows, "bus bandwidth", "B/s")
    where = f", {place} of place" if place == "out" else ", in place" if place else ""
    figure.suptitle(f"{op}{where}, {world_size} ranks, {rows[0].dtype}")
    return _saved(figure, path)


def _draw_limit(latency: Axes, bandwidth: Axes, rows: Sequence[Row]) -> None:
    limits = {row.nbytes: row for row in rows if row.limit}
    sizes = sorted(limits)
    if not sizes:
        return
    seconds = [limits[size].limit or math.nan for size in sizes]
    style: dict[str, Any] = {
        "color": "#444444",
        "linestyle": "--",
        "linewidth": 1.4,
        "label": "roofline",
    }
    latency.plot(sizes, seconds, **style)
    world_size = rows[0].world_size
    speeds = [
        bus_bandwidth(rows[0].op, size, world_size, time) * GIGABYTE
        for size, time in zip(sizes, seconds, strict=True)
    ]
    bandwidth.plot(sizes, speeds, **style)


def plot_agreement(
    series: Mapping[str, Sequence[float]], reference: str, tolerance: float, what: str, path: Path
) -> Path:
    """Writes a PNG of curves that should coincide, and how far each is from the reference.

    Args:
        series: a list of values, one a step, for each name.
        reference: the name whose curve is the right one.
        tolerance: the largest difference that counts as agreement.
        what: the quantity and its unit.
        path: where to write.
    """
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    for position, (name, values) in enumerate(series.items()):
        colour, marker = STYLES[position % len(STYLES)]
        steps = range(1, len(values) + 1)
        # Later curves are thinner and later marks smaller, so that all show where they coincide.
        later = len(series) - 1 - position
        curves.plot(steps, values, color=colour, linewidth=0.9 + 2.0 * later, label=name)
        if name != reference:
            # Exact agreement has no place on a logarithmic axis.
            apart = [abs(a - b) or math.nan for a, b in zip(values, series[reference], strict=True)]
            style = {"marker": marker, "linestyle": "", "markersize": 1.5 + 2.0 * later}
            differences.plot(steps, apart, color=colour, fillstyle="none", label=name, **style)
    curves.set(xlabel="step", ylabel=what)
    differences.axhline(tolerance, color="#444444", linestyle="--", label="tolerance")
    differences.set(xlabel="step", ylabel=f"difference from {reference}", yscale="log")
    for axes in (curves, differences):
        _frame(axes)
    return _saved(figure, path)


def _saved(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def _dress(axes: Axes, rows: Sequence[Row], y_label: str, unit: str) -> None:
    axes.set(yscale="log", xlabel="S", ylabel=y_label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row.nbytes for row in rows}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_nbytes(int(value))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=40)
    axes.yaxis.set_major_locator(LogLocator(base=10))
    axes.yaxis.set_major_formatter(EngFormatter(unit))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _frame(axes)


def _frame(axes: Axes) -> None:
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
