"""Records of what was measured, and their JSON form."""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from pycoll.bench import formulas
from pycoll.bench.cases import Case
from pycoll.tuning import machine

FORMAT = 2


@dataclass(frozen=True)
class Sample:
    """One case on one backend in one round.

    Attributes:
        seconds: a call in a block of calls back to back (median of blocks, slowest rank).
        p50, p99: percentiles of calls timed one by one (slowest rank of each call); p99 is None for
            too few calls.
        calls: K, the calls of a block.
        wrong: elements that differed from the expected ones; on a merged sample, on the worst rank.
            None if nobody looked.
        algorithm, memory_path: what pycoll's stream of events says of the last call; None for other
            libraries.
        product_slowdown: how many times as long a matrix product took beside the collective as
            alone; None if there was none.
    """

    seconds: float
    p50: float
    p99: float | None
    calls: int
    wrong: int | None
    algorithm: str | None = None
    memory_path: str | None = None
    product_slowdown: float | None = None

    @classmethod
    def slowest(cls, of_ranks: Sequence[Sample]) -> Sample:
        """One sample for all ranks: the largest time of each kind, the most wrong elements. Ranks that know each other
        have agreed on their times already.
        """
        p99 = [sample.p99 for sample in of_ranks if sample.p99 is not None]
        wrong = [sample.wrong for sample in of_ranks if sample.wrong is not None]
        slowdowns = [s.product_slowdown for s in of_ranks if s.product_slowdown is not None]
        return dataclasses.replace(
            of_ranks[0],
            seconds=max(sample.seconds for sample in of_ranks),
            p50=max(sample.p50 for sample in of_ranks),
            p99=max(p99, default=None),
            calls=min(sample.calls for sample in of_ranks),
            wrong=max(wrong, default=None),
            product_slowdown=max(slowdowns, default=None),
        )


@dataclass(frozen=True)
class Row:
    """All rounds of one case on one backend. Times are medians over the rounds.

    Attributes:
        nbytes: S in bytes, as `formulas.SIZE_MEANING` defines it.
        place: "in" or "out": whether input and output share memory.
        limit: seconds of the roofline's loop for this case in the same run (`limit`); None if it was not measured, or
            has no meaning.
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
    place: str = "in"
    reduce_op: str = "sum"
    device: str = "cpu"
    limit: float | None = None

    @classmethod
    def of(cls, case: Case, nbytes: int, world_size: int, backend: str, **more: Any) -> Row:
        """A row of a case, whose S has been rounded to `nbytes`."""
        shared = {name: getattr(case, name) for name in ("op", "dtype", "async_op", "place")}
        shared |= {"reduce_op": case.reduce_op, "device": case.device}
        return cls(nbytes=nbytes, world_size=world_size, backend=backend, **shared, **more)

    @property
    def case(self) -> tuple[Any, ...]:
        """What two backends' rows have in common."""
        kind = (self.op, self.place, self.dtype, self.reduce_op, self.async_op, self.device)
        return (*kind, self.world_size, self.nbytes)

    @property
    def title(self) -> str:
        """The case in words."""
        return f"{self.op} of {self.nbytes} B, {self.dtype}, {self.world_size} ranks"

    @property
    def algorithm(self) -> str | None:
        return self.samples[-1].algorithm if self.samples else None

    @property
    def memory_path(self) -> str | None:
        return self.samples[-1].memory_path if self.samples else None

    @property
    def product_slowdown(self) -> float | None:
        known = [s.product_slowdown for s in self.samples if s.product_slowdown is not None]
        return statistics.median(known) if known else None

    @property
    def over_limit(self) -> float | None:
        """Time over the roofline's time."""
        return self.seconds / self.limit if self.samples and self.limit else None

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
    def wrong(self) -> int | None:
        """None if no sample was checked."""
        return max((s.wrong for s in self.samples if s.wrong is not None), default=None)

    @property
    def algorithm_bandwidth(self) -> float:
        return formulas.algorithm_bandwidth(self.nbytes, self.seconds)

    @property
    def bus_bandwidth(self) -> float:
        return formulas.bus_bandwidth(self.op, self.nbytes, self.world_size, self.seconds)


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as another backend: the quotient of the medians, and the extremes of
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

    def ratio(self, row: Row, against: str | None = None) -> Ratio | None:
        """Another backend's time over this row's (the first one's, if none is named); None for that backend itself, or
        if either has no figure.
        """
        base = self.beside(row, against or self.backends[0])
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
            name = f"{row.backend}: {row.title}"
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
                record["median"] = self.derived(row)
            rows.append(record)
        whole = {"format": FORMAT, "facts": self.facts, "backends": self.backends, "rows": rows}
        return json.dumps(whole, indent=1) + "\n"

    def derived(self, row: Row) -> dict[str, Any]:
        """The figures of a measured row that follow from its samples, and its speed against each other backend."""
        ratios = {backend: self.ratio(row, backend) for backend in self.backends}
        return {
            "seconds": row.seconds,
            "p50": row.p50,
            "p99": row.p99,
            "algbw_GBps": row.algorithm_bandwidth,
            "busbw_GBps": row.bus_bandwidth,
            "over_limit": row.over_limit,
            "algorithm": row.algorithm,
            "memory_path": row.memory_path,
            "speed_against": {
                backend: dataclasses.asdict(ratio) for backend, ratio in ratios.items() if ratio
            },
        }

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
        **machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
