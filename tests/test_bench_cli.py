"""`pycoll bench` and `pycoll tune-collectives`: arguments, files, torchrun; and the roofline's and the link's
tables.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pycoll import cli
from pycoll.bench import limit, link
from pycoll.bench.arguments import add_arguments, plan_of, steps
from pycoll.bench.cases import OPS, Case
from pycoll.bench.csv_rows import HEADER, read_csv, records, write_csv
from pycoll.bench.history import Verdict, changes, plan_again, regressions, summary
from pycoll.bench.report import plain_lines
from pycoll.bench.results import Comparison, Row, Sample
from pycoll.cli.run import check_writable

FAST = ["--rounds", "1", "--repetitions", "1", "--repetition-seconds", "0.001", "-w", "1"]


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


# --- arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "no_such_backend"], "unknown backend 'no_such_backend'"),
        (["--backend", "gloo,gloo"], "backends must be distinct names"),
        (["--backend", "pycoll:fast"], "asks for algorithm 'fast'; pycoll has auto, one_shot"),
        (["allreduce"], "unknown op 'allreduce'; known: all_reduce"),
        (["--sizes", "8,x"], "'x' is not a size"),
        (["-b", "64K", "-e", "8"], "-b is 65536 and -e is 8: the last size lies before the first"),
        (["-f", "1"], "-f is 1, but must be above 1"),
        (["-d", "int7"], "unknown dtype 'int7'; known: float64"),
        (["-o", "mean"], "unknown reduce_op 'mean'; known: sum, avg"),
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
        (["--iters", "0"], "--iters is 0, but must be at least 1"),
        (["--cases", "4"], "'4' is not RANKS:SIZE"),
        (["--cases", "0:8"], "number of ranks must be at least 1, got 0"),
        (["-n", "257"], "number of ranks is 257, but each is a process of this host"),
        ([","], "no collective is named; give some of all_reduce"),
        (["-f", "inf"], "-f is inf, but must be above 1, and finite"),
        (["-w", "-1"], "-w is -1, but must not be negative"),
        (["--timeout", "0"], "--timeout is 0 s, but must be above 0"),
        (["--repetition-seconds", "-1"], "repetition_seconds is -1, but must be above 0"),
        (["--json", "/proc/x.json"], "--json is /proc/x.json, which cannot be written"),
        (["--csv", "/proc/none/x.csv"], "--csv is /proc/none/x.csv, which cannot be written"),
        (["--cases", "2:8", "--cases", "2:64"], "each number of ranks may be given once"),
        (["--sizes", "8,64,8"], "8 B and 8 B are the same case on 2 ranks"),
        (["all_gather", "--sizes", "8,9"], "8 B and 9 B are the same case"),
        (["--repetitions", "0"], "repetitions"),
        (["-n", "two"], "'two' is not a list of whole numbers"),
        (["--compare", "no.json", "new.json"], "no.json"),
        (["--verify", "no.json"], "no.json"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    backends = [] if "--backend" in arguments else ["--backend", "gloo"]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *arguments, *backends])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert error.startswith("pycoll bench: error: ")


def test_tuning_tries_its_file_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune-collectives", "--output", "/proc/tuning.json"])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert "--output is /proc/tuning.json, which cannot be written" in printed.err
    assert "measuring" not in printed.out


def test_a_file_that_is_tried_stays_as_it_is(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "folder" / "new.json"
    old.write_text("what was there")
    for path in (old, new):
        check_writable("--json", path)
    assert old.read_text() == "what was there"
    assert not new.exists()


@pytest.mark.slow
def test_sigterm_ends_ranks_and_their_folders(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pycoll.cli", "bench", "--backend", "gloo", "--rounds", "9999"]
    bench = subprocess.Popen(
        [*command, "-e", "8", "--no-limit"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("pycoll-bench-*/rank1.log")):
            assert bench.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        bench.terminate()
        assert bench.wait(120) == 128 + signal.SIGTERM
    finally:
        bench.kill()
        bench.wait()
    assert not list(tmp_path.glob("pycoll-bench-*"))


def test_sizes_grow_by_the_factor() -> None:
    assert steps(8, 1 << 30, 2)[-1] == 1 << 30
    assert len(steps(8, 1 << 30, 2)) == 28
    assert steps(1000, 2000, 1.19) == (1000, 1190, 1416, 1685)
    assert steps(1, 4, 1.1) == (1, 2, 3, 4)


def test_the_plan_has_every_place_and_the_given_numbers() -> None:
    plan = plan_of(
        parsed(
            "all",
            "-n",
            "2,4",
            "--sizes",
            "1K,64K",
            "-d",
            "bfloat16",
            "-o",
            "max",
            "-c",
            "0",
            "-w",
            "9",
        )
    )
    assert [world.world_size for world in plan.worlds] == [2, 4]
    cases = plan.worlds[0].cases
    assert {case.op for case in cases} == set(OPS)
    assert {case.dtype for case in cases} == {"bfloat16"}
    assert {case.reduce_op for case in cases} == {"max"}
    assert [case.place for case in cases if case.op == "all_gather"] == ["out", "out", "in", "in"]
    assert [case.place for case in cases if case.op == "all_to_all"] == ["out", "out"]
    assert len([case for case in cases if case.op == "barrier"]) == 1
    assert (plan.effort.warmup_calls, plan.effort.checks, plan.limits) == (9, False, True)
    plan = plan_of(parsed("--cases", "2:8,16M", "--cases", "4:8", "--place", "in", "--iters", "7"))
    sizes = [(world.world_size, [case.nbytes for case in world.cases]) for world in plan.worlds]
    assert sizes == [(2, [8, 16 << 20]), (4, [8])]
    assert (plan.effort.min_calls, plan.effort.max_calls) == (7, 7)
    # What has no in-place form is measured in the form it has.
    assert plan_of(parsed("all_to_all", "--place", "in")).worlds[0].cases[0].place == "out"


# --- results ----------------------------------------------------------------------------------------


def sample(seconds: float, **more: Any) -> Sample:
    return replace(Sample(seconds, seconds, None, 10, 0), **more)


def result(factor: float = 1.0, spread: float = 0.0) -> Comparison:
    base = Row("all_reduce", 8, "float32", False, 2, "gloo", limit=1e-7)
    fast = [2e-6 * factor * scale for scale in (1 - spread, 1.0, 1 + spread)]
    rows = (
        replace(base, samples=(sample(1e-4),) * 3),
        replace(
            base,
            backend="pycoll",
            samples=tuple(sample(t, algorithm="one_shot", memory_path="mapped") for t in fast),
        ),
        replace(base, nbytes=64, error="TypeError: no"),
    )
    return Comparison(("gloo", "pycoll"), rows, {"rounds": 3, "link": "shared memory"})


def test_csv_and_json_say_the_same(tmp_path: Path) -> None:
    whole = result()
    write_csv(whole, tmp_path / "made" / "rows.csv")
    back = read_csv(tmp_path / "made" / "rows.csv")
    assert back == records(whole)
    assert tuple(back[0]) == HEADER
    assert back[1]["time_us"] == pytest.approx(2.0)
    assert back[1]["over_limit"] == pytest.approx(20.0)
    assert (back[1]["algorithm"], back[1]["memory_path"]) == ("one_shot", "mapped")
    assert (back[2]["time_us"], back[2]["error"]) == (None, "TypeError: no")
    assert records(Comparison.from_json(whole.to_json())) == back
    stored = json.loads(whole.to_json())["rows"][1]["median"]
    assert stored["speed_against"]["gloo"]["median"] == pytest.approx(50.0)
    (tmp_path / "other.csv").write_text("a,b\\n1,2\\n")
    with pytest.raises(ValueError, match="has the columns"):
        read_csv(tmp_path / "other.csv")


def test_plain_text_needs_no_library() -> None:
    lines = plain_lines(result())
    assert len({len(line) for line in lines[:-1]}) == 1
    assert lines[2].split()[4:7] == ["pycoll", "8", "2"]
    assert lines[-1] == "link: shared memory"


@pytest.mark.parametrize(
    ("factor", "spread", "verdict"),
    [
        (1.05, 0.0, Verdict.SAME),
        (2.0, 0.0, Verdict.SLOWER),
        (0.5, 0.0, Verdict.FASTER),
        (1.3, 0.4, Verdict.NOISE),
    ],
)
def test_changes_are_told_from_noise(factor: float, spread: float, verdict: Verdict) -> None:
    listed = changes(result(spread=spread), result(factor, spread))
    assert [change.verdict for change in listed] == [Verdict.SAME, verdict]
    assert listed[1].speedup == pytest.approx(1 / factor)
    assert verdict.value in listed[1].line()
    assert summary([]) == "the files have no case in common"
    with pytest.raises(ValueError, match="margin is -1"):
        changes(result(), result(), margin=-1)


def test_compare_reads_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("old.json", "new.json")]
    for path, factor in zip(paths, (1.0, 3.0), strict=True):
        result(factor).save(Path(path))
    assert cli.main(["bench", "--compare", *paths]) == 1
    shown = capsys.readouterr().out
    assert (
        "pycoll all_reduce in float32 n=2 8 B: 2.00 µs -> 6.00 µs, 0.33 x as fast, slower" in shown
    )
    assert cli.main(["bench", "--compare", *paths[::-1]]) == 0
    assert cli.main(["bench", "--compare", *paths, "--margin", "4"]) == 0
    Path(paths[0]).write_text("{}")
    with pytest.raises(SystemExit):
        cli.main(["bench", "--compare", *paths])
    assert "is no result of pycoll bench --json" in capsys.readouterr().err


def test_ratios_are_held_against_stored_ones() -> None:
    stored = result()
    assert regressions(stored, result(1.4), margin=0.5) == []
    (line,) = regressions(stored, result(1.6), 0.5)
    assert "31.25 x as fast as gloo, was 50.00 (margin 50%)" in line
    # Twice as slow a machine changes no ratio.
    slower = result()
    rows = tuple(
        replace(row, samples=tuple(replace(s, seconds=2 * s.seconds) for s in row.samples))
        for row in slower.rows[:2]
    )
    assert regressions(replace(stored, rows=stored.rows[:2]), replace(slower, rows=rows), 0.0) == []
    missing = replace(stored, rows=stored.rows[:1])
    assert "not measured, was 50.00 x gloo" in regressions(stored, missing, 0.5)[0]
    wrong = replace(stored.rows[1], samples=(sample(1e-9, wrong=3),) * 3)
    again = replace(stored, rows=(stored.rows[0], wrong))
    assert "3 wrong elements" in regressions(stored, again, 0.5)[0]
    plan = plan_again(stored)
    assert plan.backends == ("gloo", "pycoll")
    assert [case.nbytes for case in plan.worlds[0].cases] == [8, 64]


# --- the roofline and the link -----------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_limit_writes_every_byte_that_the_collective_writes(op: str, world_size: int) -> None:
    """Byte by byte: who ends where, and from what."""
    part = 200  # no multiple of a line
    cut = op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
    nbytes = part * world_size if cut else 1000
    of_ranks = limit.transfers(op, nbytes, world_size)
    if op == "barrier":
        assert of_ranks is None
        return
    assert of_ranks is not None
    assert len(of_ranks) == world_size
    written: dict[tuple[int, int], frozenset[tuple[int, int]]] = {}
    for t in (transfer for mine in of_ranks for transfer in mine):
        assert (t.at % 64, t.to % 64, t.begin % 64) == (0, 0, 0)
        for byte in range(t.begin, t.end):
            for destination in t.destinations:
                assert (destination, t.to + byte) not in written, "two ranks write one byte"
                written[destination, t.to + byte] = frozenset((s, t.at + byte) for s in t.sources)
    assert written == expected_bytes(op, nbytes, world_size, part)


def expected_bytes(
    op: str, nbytes: int, n: int, part: int
) -> dict[tuple[int, int], frozenset[tuple[int, int]]]:
    """(buffer, byte) -> the (buffer, byte)s it is made of; parts begin at lines."""
    padded = limit.padded_part(part)
    ranks = range(n)

    def everyone(byte: int) -> frozenset[tuple[int, int]]:
        return frozenset((rank, byte) for rank in ranks)

    def only(rank: int, byte: int) -> frozenset[tuple[int, int]]:
        return frozenset([(rank, byte)])

    match op:
        case "all_reduce":
            return {(r, b): everyone(b) for r in ranks for b in range(nbytes)}
        case "reduce":
            return {(0, b): everyone(b) for b in range(nbytes)}
        case "broadcast":
            return {(r, b): only(0, b) for r in ranks[1:] for b in range(nbytes)}
        case "send_recv":
            return {(n + r, b): only((r - 1) % n, b) for r in ranks for b in range(nbytes)}
        case "reduce_scatter":
            return {(n + r, b): everyone(r * padded + b) for r in ranks for b in range(part)}
        case "gather":
            return {(n, r * padded + b): only(r, b) for r in ranks for b in range(part)}
        case "scatter":
            return {(n + r, b): only(0, r * padded + b) for r in ranks for b in range(part)}
        case "all_gather":
            pairs = [(r, p) for r in ranks for p in ranks]
            return {(n + r, p * padded + b): only(p, b) for r, p in pairs for b in range(part)}
        case _:
            pairs = [(r, p) for r in ranks for p in ranks]
            return {
                (n + r, p * padded + b): only(p, r * padded + b)
                for r, p in pairs
                for b in range(part)
            }


@pytest.mark.parametrize("op", [op for op in OPS if op != "barrier"])
def test_the_limit_is_measured(op: str) -> None:
    for nbytes in (4, 3000):
        measured = limit.measure_limit(Case(op, nbytes, in_place=None), 2, 1, 1e-4)
        assert measured is not None
        assert 0 < measured.seconds < 1
        assert measured.store in ("ordinary", "non-temporal")
    assert limit.measure_limit(Case("barrier", 8), 2) is None
    assert limit.measure_limit(Case("all_reduce", 8, device="cuda"), 2) is None


class FalseNvml:
    """Looks like pynvml: `lanes[i]` are the generations of GPU i's active lanes."""

    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED = 18, 1

    class NVMLError(Exception):
        pass

    def __init__(self, *lanes: list[int]) -> None:
        self.lanes, self.open = lanes, 0

    def nvmlInit(self) -> None:  # noqa: N802 (the library's spelling)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetNvLinkState(self, gpu: int, lane: int) -> int:  # noqa: N802
        if lane >= len(self.lanes[gpu]):
            raise self.NVMLError
        return 1 if self.lanes[gpu][lane] else 0

    def nvmlDeviceGetNvLinkVersion(self, gpu: int, lane: int) -> int:  # noqa: N802
        return self.lanes[gpu][lane]


def test_links_are_named() -> None:
    assert str(link.link_of("cpu", 4)) == "shared memory"
    assert str(link.link_of("cpu", 4, hosts=["a", "b", "a", "b"])) == "TCP (2 hosts)"
    nvml = FalseNvml([4] * 18, [4] * 12 + [0] * 6)
    text = "NVLink (generation 4, 12 lanes a GPU, 300 GB/s each way)"
    assert str(link.gpu_link(nvml, 2)) == text
    assert str(link.gpu_link(FalseNvml([4] * 18, []), 2)) == "PCIe (GPU 1 has no active NVLink)"
    assert nvml.open == 0


# --- the program --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bench_measures_and_writes_every_kind_of_file(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("out.json", "out.csv", "out.png")]
    arguments = ["all_reduce,all_to_all", "--sizes", "4K,64K", "--backend", "gloo,pycoll,floor,mpi"]
    output = [x for pair in zip(("--json", "--csv", "--plot"), files, strict=True) for x in pair]
    environment = {**os.environ, "PATH": "/nowhere", "PYCOLL_TUNING": "off"}
    hide_mpi = (
        "import sys; sys.modules['mpi4py'] = None; from pycoll.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide_mpi, "bench", *arguments, *FAST, *output],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("mpi: skipped: ")
    whole = Comparison.from_json(Path(files[0]).read_text())
    assert whole.backends == ("gloo", "pycoll", "floor")
    assert [row.wrong for row in whole.rows] == [0, 0, None] * 6
    assert all(row.limit and row.over_limit for row in whole.rows)
    assert whole.facts["link"] == "shared memory"
    assert read_csv(Path(files[1])) == records(whole)
    assert len(list(tmp_path.glob("out_*.png"))) == 3
    assert "over shared memory" in done.stdout


@pytest.mark.slow
def test_bench_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += ["-m", "pycoll.cli", "bench", "all_reduce,send_recv", "--sizes", "4K", *FAST]
    done = subprocess.run(
        [*command, "--backend", "gloo,pycoll,floor", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "floor: skipped: floor starts its own ranks" in done.stdout
    assert done.stdout.count("over shared memory") == 3  # rank 0 prints, once a table
    whole = Comparison.from_json(path.read_text())
    assert [row.world_size for row in whole.rows] == [2] * 6
    assert [row.wrong for row in whole.rows] == [0] * 6
    assert {
        row.algorithm for row in whole.rows if row.backend == "pycoll" and row.op == "all_reduce"
    } == {"one_shot"}


@pytest.mark.slow
def test_tune_collectives_writes_a_table_that_groups_use(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    arguments = ["-b", "1K", "-e", "64K", "-f", "64", "--rounds", "1"]
    arguments += ["--repetition-seconds", "0.001", "--output", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "pycoll.cli", "tune-collectives", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {row["collective"] for row in rows} >= {"all_reduce", "reduce", "all_gather"}
    from pycoll.bench.engine import Effort
    from pycoll.bench.ranks import RankGroup

    last = [row for row in rows if row["collective"] == "all_reduce"][-1]["algorithm"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYCOLL_TUNING", str(path))
        with RankGroup("pycoll", 2, timeout=60.0) as group:
            group.wait_until_ready()
            quick = Effort(repetitions=1, repetition_seconds=0.001)
            taken = group.measure(Case("all_reduce", 1 << 20), quick)
    assert isinstance(taken, Sample)
    assert taken.algorithm == last


def test_one_rank_has_no_crossover(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune-collectives", "-n", "1"])
    assert stopped.value.code == 2
    assert "--ranks has 1" in capsys.readouterr().err
