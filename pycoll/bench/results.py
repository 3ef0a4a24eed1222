"""Records of what was measured, and their JSON form."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from pycoll.bench import formulas

FORMAT = 1


@dataclass(frozen=True)
class Sample:
    """One case on one backend in one round.

    Attributes:
        seconds: a call in a block of calls back to back (median of blocks, slowest rank).
        p50, p99: percentiles of calls timed one by one (slowest rank of each call); p99 is None for
            too few calls.
        calls: K, the calls of a block.
        wrong: elements that differed from the expected ones; on a merged sample, on the worst rank.
    """

    seconds: float
    p50: float
    p99: float | None
    calls: int
    wrong: int


@dataclass(frozen=True)
class Row:
    """All rounds of one case on one backend. Times are medians over the rounds.

    Attributes:
        nbytes: S in bytes, as `formulas.SIZE_MEANING` defines it.
        samples: one a round; empty if the backend refused the case, and `error` says why.
    """

    op: str
    nbytes: int
    dtype: str
    async_op: bool
    world_size: int
    backend: str
    samples: tuple[Sample, ...] = ()
    error: str | None = None

    @property
    def case(self) -> tuple[str, int, str, bool, int]:
        """What two backends' rows have in common."""
        return self.op, self.nbytes, self.dtype, self.async_op, self.world_size

    @property
    def seconds(self) -> float:
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def p50(self) -> float:
        return statistics.median(sample.p50 for sample in self.samples)

    @property
    def p99(self) -> float | None:
        known = [sample.p99 for sample in self.samples if sample.p99 is not None]
        return statistics.median(known) if known else None

    @property
    def wrong(self) -> int:
        return max((sample.wrong for sample in self.samples), default=0)

    @property
    def algorithm_bandwidth(self) -> float:
        return formulas.algorithm_bandwidth(self.nbytes, self.seconds)

    @property
    def bus_bandwidth(self) -> float:
        return formulas.bus_bandwidth(self.op, self.nbytes, self.world_size, self.seconds)


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as the first backend: the quotient of the medians, and the extremes of
    the rounds'.
    """

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Rows of several backends measured in turn; the first backend is what the others are held
    against.
    """

    backends: tuple[str, ...]
    rows: tuple[Row, ...]
    facts: dict[str, Any]

    def beside(self, row: Row, backend: str) -> Row:
        """The same case on another backend. Raises KeyError if it was not measured."""
        for other in self.rows:
            if other.backend == backend and other.case == row.case:
                return other
        raise KeyError(
            f"{row.op} of {row.nbytes} B on {row.world_size} ranks was not measured on {backend}"
        )

    def ratio(self, row: Row) -> Ratio | None:
        """First backend's time over this row's; None for the first backend itself, or if either has
        no figure.
        """
        base = self.beside(row, self.backends[0])
        if row.backend == base.backend or not row.samples or not base.samples:
            return None
        rounds = [
            theirs.seconds / mine.seconds
            for theirs, mine in zip(base.samples, row.samples, strict=True)
        ]
        return Ratio(base.seconds / row.seconds, min(rounds), max(rounds))

    @property
    def failures(self) -> list[str]:
        """A line for each row that is refused or has wrong elements."""
        lines = []
        for row in self.rows:
            name = f"{row.backend}: {row.op} of {row.nbytes} B, {row.dtype}, {row.world_size} ranks"
            if row.error is not None:
                lines.append(f"{name}: {row.error}")
            elif row.wrong:
                lines.append(f"{name}: {row.wrong} wrong elements")
        return lines

    def to_json(self) -> str:
        """The samples with the derived figures beside them, for readers without this module."""
        rows = []
        for row in self.rows:
            record = dataclasses.asdict(row)
            if row.samples:
                ratio = self.ratio(row)
                record["median"] = {
                    "seconds": row.seconds,
                    "p50": row.p50,
                    "p99": row.p99,
                    "algbw_GBps": row.algorithm_bandwidth,
                    "busbw_GBps": row.bus_bandwidth,
                    f"speed_against_{self.backends[0]}": dataclasses.asdict(ratio)
                    if ratio
                    else None,
                }
            rows.append(record)
        whole = {"format": FORMAT, "facts": self.facts, "backends": self.backends, "rows": rows}
        return json.dumps(whole, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """Reads `to_json`'s text; derived figures are computed anew. Raises ValueError for another
        format.
        """
        whole = json.loads(text)
        if whole.get("format") != FORMAT:
            raise ValueError(f"format {whole.get('format')!r} is not {FORMAT}")
        rows = []
        for record in whole["rows"]:
            record.pop("median", None)
            samples = tuple(Sample(**sample) for sample in record.pop("samples"))
            rows.append(Row(samples=samples, **record))
        return cls(tuple(whole["backends"]), tuple(rows), whole["facts"])

    def save(self, path: Path) -> None:
        """Writes the JSON form, making the folder if need be."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")


def machine_facts() -> dict[str, Any]:
    """What a reader has to know to judge the figures."""
    return {
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
