"""What a collective costs as a function of its size: t(S) = α + β S, piece by piece.

Protocols and caches bend the curve, so there are up to `MOST_PIECES` pieces, each over neighbouring sizes.
Errors are taken as relative (every size counts the same), the pieces that fit best are found exactly by dynamic
programming over where to cut, and their number is the one with the least Bayesian information criterion.
Confidence intervals are those of weighted least squares, with Student's t. The time of a size is the median of
its rounds.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pycoll.bench.extras import need

MOST_PIECES = 3
LEAST_SIZES = 4  # of a piece: two parameters, and something to see how well they do
CONFIDENCE = 0.95
# Of a piece, times log(number of sizes): its two parameters and the cut, twice over, since the best cut is
# searched for.
PENALTY = 6
FORMAT = 1


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Piece:
    """t(S) = alpha + beta S for begin <= S <= end.

    Attributes:
        alpha: seconds.
        beta: seconds a byte.
        residual: standard deviation of (measured − model) / measured.
    """

    begin: int
    end: int
    alpha: Interval
    beta: Interval
    residual: float


@dataclass(frozen=True)
class Fit:
    """Attributes:
    pieces: in order of size.
    residuals: (S, (median measured − model) / measured) of each size.
    """

    pieces: tuple[Piece, ...]
    residuals: tuple[tuple[int, float], ...]

    def seconds(self, nbytes: float) -> float:
        """What the model says; beyond the measured sizes the outermost pieces go on."""
        piece = next((p for p in self.pieces if nbytes <= p.end), self.pieces[-1])
        return piece.alpha.value + piece.beta.value * nbytes


def fit(samples: Sequence[tuple[int, Sequence[float]]], most_pieces: int = MOST_PIECES) -> Fit:
    """The piecewise model of measured times.

    Args:
        samples: (S in bytes, seconds of each round), in increasing order of S.
        most_pieces: at most so many pieces.

    Raises:
        ValueError: too few sizes, sizes out of order, or times that are not positive.
        MissingExtra: numpy or scipy is not installed.
    """
    need("scipy.stats", "--fit")
    sizes = [nbytes for nbytes, _ in samples]
    if len(sizes) < LEAST_SIZES:
        raise ValueError(f"{len(sizes)} sizes cannot be fitted; measure {LEAST_SIZES} or more")
    if any(a >= b for a, b in pairwise(sizes)):
        raise ValueError(f"sizes must increase, got {sizes}")
    if not all(rounds and min(rounds) > 0 for _, rounds in samples):
        raise ValueError("every size needs at least one time, and times are positive")
    medians = [(nbytes, statistics.median(rounds)) for nbytes, rounds in samples]
    cuts = _best_cuts(medians, most_pieces)
    pieces = tuple(_piece(medians[begin:end]) for begin, end in cuts)
    model = Fit(pieces, ())
    residuals = ((nbytes, (time - model.seconds(nbytes)) / time) for nbytes, time in medians)
    return Fit(pieces, tuple(residuals))


def _solve(samples: Sequence[tuple[int, float]]) -> tuple[Any, Any, float]:
    """Parameters, their covariance over the variance of an error, and the sum of squared relative errors."""
    import numpy

    sizes, times = (numpy.array(column, dtype=float) for column in zip(*samples, strict=True))
    # Sizes scaled to about 1, or the matrix is badly conditioned.
    scale = sizes.max()
    matrix = numpy.stack([1 / times, sizes / scale / times], axis=1)
    parameters, *_ = numpy.linalg.lstsq(matrix, numpy.ones_like(times), rcond=None)
    errors = 1 - matrix @ parameters
    unscale = numpy.array([1, 1 / scale])
    covariance = numpy.linalg.pinv(matrix.T @ matrix) * numpy.outer(unscale, unscale)
    return parameters * unscale, covariance, float(errors @ errors)


def _best_cuts(samples: Sequence[tuple[int, float]], most_pieces: int) -> list[tuple[int, int]]:
    """Ranges of sizes that share a piece."""
    n = len(samples)
    cost = {
        (i, j): _solve(samples[i:j])[2] for i in range(n) for j in range(i + LEAST_SIZES, n + 1)
    }
    # best[j]: least error of the first j sizes with so many pieces, and where the last one begins.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for _ in range(most_pieces):
        before = best[-1]
        ends: dict[int, tuple[float, int]] = {}
        for j in range(LEAST_SIZES, n + 1):
            options = [(e + cost[i, j], i) for i, (e, _) in before.items() if (i, j) in cost]
            if options:
                ends[j] = min(options)
        best.append(ends)

    def criterion(pieces: int) -> float:
        error = max(best[pieces][n][0], 1e-12 * n)
        return n * math.log(error / n) + PENALTY * pieces * math.log(n)

    chosen = min((k for k in range(1, len(best)) if n in best[k]), key=criterion)
    cuts, end = [], n
    for pieces in range(chosen, 0, -1):
        begin = best[pieces][end][1]
        cuts.append((begin, end))
        end = begin
    return cuts[::-1]


def _piece(samples: Sequence[tuple[int, float]]) -> Piece:
    from scipy import stats

    parameters, covariance, error = _solve(samples)
    freedom = len(samples) - 2
    variance = error / freedom
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
    intervals = []
    for index in range(2):
        value, half = (
            float(parameters[index]),
            reach * math.sqrt(variance * covariance[index][index]),
        )
        intervals.append(Interval(value, value - half, value + half))
    alpha, beta = intervals
    return Piece(samples[0][0], samples[-1][0], alpha, beta, math.sqrt(variance))


def save_fits(path: Path, facts: dict[str, Any], entries: Sequence[dict[str, Any]]) -> None:
    """Writes fits as JSON: format, facts of the machine and the run, and an entry a collective, algorithm and load."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"format": FORMAT, "confidence": CONFIDENCE, "facts": facts, "fits": list(entries)}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def as_entry(model: Fit, **what: Any) -> dict[str, Any]:
    """A fit for `save_fits`, with what it is a fit of."""
    return {**what, **asdict(model)}


def load_fits(path: Path) -> list[tuple[dict[str, Any], Fit]]:
    """What `save_fits` wrote: what each entry is a fit of, and the fit.

    Raises:
        ValueError: the format is another one.
    """
    whole = json.loads(path.read_text(encoding="utf-8"))
    if whole.get("format") != FORMAT:
        raise ValueError(f"{path} has format {whole.get('format')!r}, not {FORMAT}")
    loaded = []
    for entry in whole["fits"]:
        pieces = tuple(
            Piece(
                piece["begin"],
                piece["end"],
                Interval(**piece["alpha"]),
                Interval(**piece["beta"]),
                piece["residual"],
            )
            for piece in entry.pop("pieces")
        )
        residuals = tuple((size, error) for size, error in entry.pop("residuals"))
        loaded.append((entry, Fit(pieces, residuals)))
    return loaded
