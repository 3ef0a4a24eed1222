"""What buckets did during backward passes: as a table, as JSON and for chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pycoll.backend import events
from pycoll.parallel.agreement import Group
from pycoll.parallel.passes import PassRecord


@dataclass(frozen=True)
class ParameterTime:
    """Attributes: name of a parameter; ready_ms: its gradient was complete; None: it got none."""

    name: str
    ready_ms: float | None


@dataclass(frozen=True)
class BucketTime:
    """One bucket in one backward pass. Milliseconds since the pass began.

    Attributes:
        index: its place in the order of reduction.
        nbytes: of its gradients.
        ready_ms: its last gradient was complete; None: some parameter got none, and the end of the pass completed it.
        start_ms: its reduction was issued.
        end_ms: the reduction had ended (as the group's events have it; where a hook reduces, or the events are gone,
            when the wait for it returned, which can be later).
        exposed_ms: the backward pass did nothing but issue it and wait for it.
    """

    index: int
    nbytes: int
    parameters: tuple[ParameterTime, ...]
    ready_ms: float | None
    start_ms: float
    end_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class PassTime:
    """One backward pass that synchronised.

    Attributes:
        number: from 1.
        begun_ns: of ``time.monotonic_ns()``.
        total_ms: from reaching the model's output to the last gradient's mean.
        exposed_ms: of its buckets together.
    """

    number: int
    begun_ns: int
    total_ms: float
    exposed_ms: float
    buckets: tuple[BucketTime, ...]


class Timeline:
    """The last passes of this rank, oldest first.

    Attributes:
        rank: in the group.
        passes: of type `PassTime`.
    """

    def __init__(self, rank: int, passes: Sequence[PassTime]) -> None:
        self.rank = rank
        self.passes = list(passes)

    def table(self, number: int | None = None) -> Any:
        """A ``rich.table.Table`` of one pass (None: the last); print it with ``rich.print``.

        Raises:
            ValueError: there is no such pass.
        """
        from rich.table import Table

        chosen = self._pass(number)
        title = (
            f"rank {self.rank}, pass {chosen.number}: {chosen.total_ms:.2f} ms, "
            f"{chosen.exposed_ms:.2f} ms of communication exposed"
        )
        table = Table(title=title)
        table.add_column("bucket", justify="right")
        for name in ("KiB", "ready ms", "start ms", "end ms", "exposed ms"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("parameters")
        for bucket in chosen.buckets:
            table.add_row(
                str(bucket.index),
                f"{bucket.nbytes / 1024:.1f}",
                "–" if bucket.ready_ms is None else f"{bucket.ready_ms:.2f}",
                *(f"{ms:.2f}" for ms in (bucket.start_ms, bucket.end_ms, bucket.exposed_ms)),
                _names(bucket),
            )
        return table

    def _pass(self, number: int | None) -> PassTime:
        known = {each.number: each for each in self.passes}
        if not known:
            raise ValueError("no backward pass has synchronised gradients yet")
        if number is None:
            return self.passes[-1]
        if number not in known:
            raise ValueError(f"pass {number} is not kept; there are {sorted(known)}")
        return known[number]

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()

    def json(self) -> str:
        """All passes: {"rank", "passes": [{"number", "total_ms", …, "buckets": […]}]}, as the dataclasses here."""
        return json.dumps({"rank": self.rank, "passes": [asdict(each) for each in self.passes]})

    def save_chrome_trace(self, path: str | Path) -> Path:
        """Writes all passes for chrome://tracing or Perfetto: rank as process, backward pass, buckets and
        parameters as rows. Files of several ranks of one host share their clock and can be concatenated.

        Returns:
            the file. Raises OSError if it cannot be written.
        """
        path = Path(path)
        content = {"traceEvents": self.chrome_events(), "displayTimeUnit": "ms"}
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    def chrome_events(self) -> list[dict[str, Any]]:
        """The events of `save_chrome_trace`; times in µs of ``time.monotonic_ns()``."""
        trace: list[dict[str, Any]] = []
        for each in self.passes:
            begun = each.begun_ns / 1e3

            def span(row: str, name: str, start: float, end: float, begun: float = begun) -> None:
                where = {"pid": self.rank, "tid": row, "ts": begun + start * 1e3}
                trace.append({"ph": "X", "name": name, "dur": (end - start) * 1e3, **where})

            span("backward", f"pass {each.number}", 0.0, each.total_ms)
            for bucket in each.buckets:
                name = f"bucket {bucket.index}, {bucket.nbytes} B"
                span("reduction", name, bucket.start_ms, bucket.end_ms)
                for p in bucket.parameters:
                    if p.ready_ms is not None:
                        where = {
                            "pid": self.rank,
                            "tid": "gradients",
                            "ts": begun + p.ready_ms * 1e3,
                        }
                        trace.append({"ph": "i", "s": "t", "name": p.name, **where})
        return trace


def _names(bucket: BucketTime) -> str:
    names = [parameter.name for parameter in bucket.parameters]
    if len(names) == 1:
        return names[0]
    return f"{len(names)}: {names[0]} to {names[-1]}"


def make_timeline(rank: int, history: Sequence[PassRecord], group: Group) -> Timeline:
    """From the records of a reducer and the events of its group."""
    ends = {
        event["sequence"]: event["ended_ns"]
        for event in events(group)
        if event["operation"] == "all_reduce" and event["ended_ns"]
    }
    return Timeline(rank, [_pass_time(record, ends) for record in history])


def _pass_time(kept: PassRecord, ends: dict[int, int]) -> PassTime:
    def since(ns: int) -> float:
        return (ns - kept.begun_ns) / 1e6

    buckets = []
    for bucket, record in zip(kept.buckets, kept.records, strict=True):
        times = tuple(
            ParameterTime(name, since(kept.ready_ns[index]) if kept.ready_ns[index] else None)
            for index, name in zip(bucket.members, bucket.names, strict=True)
        )
        ready = [kept.ready_ns[index] for index in bucket.members]
        end_ns = ends.get(record.sequence, record.end_ns) or record.start_ns
        buckets.append(
            BucketTime(
                index=bucket.index,
                nbytes=bucket.nbytes,
                parameters=times,
                ready_ms=since(max(ready)) if all(ready) else None,
                start_ms=since(record.start_ns),
                end_ms=since(end_ns),
                exposed_ms=record.exposed_ns / 1e6,
            )
        )
    exposed = sum(bucket.exposed_ms for bucket in buckets)
    return PassTime(kept.number, kept.begun_ns, since(kept.end_ns), exposed, tuple(buckets))
