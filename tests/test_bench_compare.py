"""Comparisons of backends: records, tables, plots, turns, real ranks, and the script."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pycoll.bench import compare as compare_module
from pycoll.bench.cases import OPS, Case
from pycoll.bench.compare import Plan, World, compare
from pycoll.bench.engine import Effort
from pycoll.bench.peers import check_backend, check_peer
from pycoll.bench.plots import plot_agreement, plot_comparison
from pycoll.bench.ranks import RankError, RankGroup, Refusal
from pycoll.bench.results import Comparison, Row, Sample
from pycoll.bench.tables import comparison_tables, legend

QUICK = Effort(warmup_calls=1, repetitions=1, repetition_seconds=0.001)


# --- comparisons ----------------------------------------------------------------------------------


def sample(seconds, wrong=0, p99=None):
    return Sample(seconds=seconds, p50=seconds * 0.9, p99=p99, calls=10, wrong=wrong)


def comparison():
    base = Row("all_reduce", 16 << 20, "float32", False, 2, "slow")
    small = replace(base, nbytes=8)
    rows = (
        replace(small, samples=(sample(300e-6, p99=1e-3), sample(200e-6), sample(400e-6))),
        replace(
            small, backend="quick", samples=(sample(30e-6), sample(10e-6), sample(20e-6, wrong=2))
        ),
        replace(base, samples=(sample(0.014),) * 3),
        replace(base, backend="quick", error="RuntimeError: no memory"),
    )
    return Comparison(("slow", "quick"), rows, {"rounds": 3, "torch": torch.__version__})


def test_medians_and_ratios():
    whole = comparison()
    slow, quick = whole.rows[:2]
    assert (slow.seconds, quick.seconds) == (300e-6, 20e-6)
    assert slow.p99 == 1e-3
    assert whole.rows[2].bus_bandwidth == pytest.approx((16 << 20) / 0.014 / 1e9)
    ratio = whole.ratio(quick)
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((15.0, 10.0, 20.0))
    assert whole.ratio(slow) is None
    assert whole.ratio(whole.rows[3]) is None
    assert whole.failures == [
        "quick: all_reduce of 8 B, float32, 2 ranks: 2 wrong elements",
        "quick: all_reduce of 16777216 B, float32, 2 ranks: RuntimeError: no memory",
    ]


def test_json_round_trip(tmp_path):
    whole = comparison()
    whole.save(tmp_path / "made" / "results.json")
    text = (tmp_path / "made" / "results.json").read_text(encoding="utf-8")
    assert Comparison.from_json(text) == whole
    with pytest.raises(ValueError, match="format 99"):
        Comparison.from_json(text.replace('"format": 2', '"format": 99'))


def test_tables_show_sizes_times_ratios_and_errors():
    console = Console(width=100, record=True, file=io.StringIO())
    for table in comparison_tables(comparison()):
        console.print(table)
    console.print(legend(comparison()))
    text = console.export_text()
    assert "S: bytes of the tensor on each rank" in text
    line = next(line for line in text.splitlines() if " 8 B " in line)
    for cell in ("300 µs", "1.00 ms", "20.0 µs", "15.00 (10.00–20.00)", " 2 "):
        assert cell in line
    refused = next(line for line in text.splitlines() if "16 MiB" in line)
    assert "14.0 ms" in refused
    assert "refused" in refused
    assert "Medians of 3 rounds" in text


def test_tables_fit_a_narrow_terminal():
    console = Console(width=80, record=True, file=io.StringIO())
    for table in comparison_tables(comparison(), console.width):
        console.print(table)
    line = next(line for line in console.export_text().splitlines() if " 8 B " in line)
    for cell in ("300 µs", "20.0 µs", " 15.00 ", " 2 "):
        assert cell in line
    assert "…" not in line


def test_plots_are_written(tmp_path):
    first = plot_comparison(comparison(), "all_reduce", 2, tmp_path / "a" / "bandwidth.png")
    curves = {"one": [3.0, 2.0], "same": [3.0, 2.0], "right": [3.0, 2.5]}
    second = plot_agreement(curves, "right", 0.1, "loss", tmp_path / "loss.png")
    for path in (first, second):
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing was measured for broadcast"):
        plot_comparison(comparison(), "broadcast", 2, tmp_path / "none.png")


class FalseGroups:
    """In place of RankGroup: writes down who is asked for what."""

    def __init__(self, refusing=()):
        self.turns, self.alive, self.started, self.refusing = [], [], 0, refusing

    def __call__(self, backend, world_size, timeout, device):
        assert device == "cpu"
        self.started += 1
        return _FalseGroup(self, backend, world_size)


class _FalseGroup:
    def __init__(self, log, backend, world_size):
        self.log, self.backend, self.world_size = log, backend, world_size
        self.facts = {"library": f"{backend} 1.0"}

    def __enter__(self):
        self.log.alive.append(self.backend)
        return self

    def __exit__(self, *_):
        self.log.alive.remove(self.backend)

    def wait_until_ready(self):
        pass

    def measure(self, case, effort, beside_products):
        assert self.backend in self.log.alive
        self.log.turns.append((self.world_size, case.nbytes, self.backend))
        if (self.backend, case.nbytes) in self.log.refusing:
            return Refusal("RuntimeError: not supported")
        return sample(1e-3 * len(self.log.turns))


def small_plan(**changes):
    cases = (Case("all_reduce", 8), Case("all_reduce", 64))
    plan = Plan(("gloo",), (World(2, cases), World(4, cases[:1])), rounds=2)
    object.__setattr__(plan, "backends", ("a", "b"))
    for name, value in changes.items():
        object.__setattr__(plan, name, value)
    return plan


def test_backends_take_turns_and_every_second_round_is_reversed(monkeypatch):
    groups = FalseGroups()
    monkeypatch.setattr(compare_module, "RankGroup", groups)
    shown = []
    result = compare(small_plan(), lambda done, total, what: shown.append((done, total)))
    there, back = (
        [(2, s, b) for s in (8, 64) for b in "ab"],
        [(2, s, b) for s in (8, 64) for b in "ba"],
    )
    assert groups.turns == [*there, *back, (4, 8, "a"), (4, 8, "b"), (4, 8, "b"), (4, 8, "a")]
    assert shown == [(done, 12) for done in range(13)]
    assert groups.started == 4
    assert groups.alive == []
    assert [(row.world_size, row.nbytes, row.backend) for row in result.rows] == [
        *there,
        (4, 8, "a"),
        (4, 8, "b"),
    ]
    assert [len(row.samples) for row in result.rows] == [2] * 6


def test_fresh_ranks_are_started_for_every_round(monkeypatch):
    groups = FalseGroups()
    monkeypatch.setattr(compare_module, "RankGroup", groups)
    compare(small_plan(fresh_ranks=True))
    assert groups.started == 8


def test_a_refused_case_is_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr(compare_module, "RankGroup", FalseGroups(refusing={("b", 64)}))
    result = compare(small_plan())
    assert [row.error for row in result.rows if row.samples == ()] == [
        "RuntimeError: not supported"
    ]
    assert len(result.failures) == 1


def test_unknown_backends_are_refused_before_anything_starts():
    check_backend("gloo")
    for name in ("gloo", "pycoll", "pycoll.direct", "mpi", "floor", "pycoll:two_shot"):
        assert check_peer(name).name == name
    with pytest.raises(
        ValueError, match="'pycoll:fast' asks for algorithm 'fast'; pycoll has auto"
    ):
        check_peer("pycoll:fast")
    with pytest.raises(ValueError, match="'gloo:ring' asks gloo for an algorithm"):
        check_peer("gloo:ring")
    for name in ("undefined", "fake", "no_such_backend", ""):
        with pytest.raises(ValueError, match=f"unknown backend '{name}'.*gloo.*mpi, floor"):
            check_peer(name)
        with pytest.raises(ValueError, match=f"unknown backend '{name}'.*gloo"):
            check_backend(name)
    with pytest.raises(ValueError, match="distinct"):
        Plan(("gloo", "gloo"), ())
    with pytest.raises(ValueError, match="rounds"):
        Plan(("gloo",), (), rounds=0)


# --- real ranks -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_measure_refuse_and_are_missed_when_they_die():
    with RankGroup("gloo", 2, timeout=60.0) as group:
        group.wait_until_ready()
        for op in OPS:
            for async_op in (False, True):
                answer = group.measure(Case(op, 4 * 1009, async_op=async_op), QUICK)
                assert isinstance(answer, Sample)
                assert answer.wrong == 0
                assert 0 < answer.p50 < 10
        refusal = group.measure(Case("all_reduce", 8), _effort_without_calls())
        assert isinstance(refusal, Refusal)
        assert refusal.reason.startswith("ValueError: repetitions and calls must be positive")
        assert isinstance(group.measure(Case("all_reduce", 8), QUICK), Sample)
        victim = group._processes[1]
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(RankError, match="gloo: rank 1 of 2 died"):
            group.measure(Case("all_reduce", 8), QUICK)
    assert all(process.poll() is not None for process in group._processes)
    assert not Path(group._folder.name).exists()


def _effort_without_calls():
    """What no user can make: every rank raises on it, and all alike."""
    effort = Effort()
    object.__setattr__(effort, "min_calls", 0)
    return effort


@pytest.mark.slow
def test_a_group_that_cannot_join_says_so():
    message = "no_such_backend: rank 0 of 1 could not join"
    with (
        RankGroup("no_such_backend", 1, timeout=60.0) as group,
        pytest.raises(RankError, match=message),
    ):
        group.wait_until_ready()
