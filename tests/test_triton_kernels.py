"""Triton kernels by Triton's interpreter: ranks are processes, and their memory is pycoll's symmetric memory of the
CPU.

The interpreter shows what kernels compute, on every dtype, op, size, alignment and group; and the protocol between
real processes. Programs of a grid run one after another there. Orders of memory are the simulator's part
(test_triton_ptx.py).
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator

import pytest
import torch
import triton_ranks
import triton_trials
from triton_trials import Case

from pycoll import reference
from pycoll.testing import RankPool

pytest.importorskip("triton", reason="Triton is not installed")

FULL = os.environ.get("PYCOLL_TEST_FULL") == "1"
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *reference.INTEGER_DTYPES,
    torch.bool,
    *reference.COMPLEX_DTYPES,
)
NUMELS = (0, 1, 13, 97, 251)
Pools = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Pools]:
    """Ranks in which triton.jit interprets."""
    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(
                world_size, timeout=300.0, env={"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
            )
        return pools[world_size]

    yield pool_of
    for pool in pools.values():
        pool.close()


def all_cases() -> list[Case]:
    product = itertools.product(
        triton_trials.KERNELS, DTYPES, reference.OPS, NUMELS, (0, 1), (False, True), (False, True)
    )
    return [
        Case(*what)
        for what in product
        if reference.is_valid(what[2], what[1])
        and (what[0] != "all_gather" or what[2] == "sum")
        and (what[0] in ("reduce_scatter", "all_gather") or not what[6])
    ]


def sample() -> list[Case]:
    """Cases in which each two values of two properties meet, but for places and sizes, which meet the kernels only."""
    cases = all_cases()
    random.Random(5).shuffle(cases)
    seen: set[tuple[object, ...]] = set()
    chosen = []
    for case in cases:
        pairs = {
            ("dtype, op", case.dtype, case.op),
            ("kernel, dtype", case.kernel, case.dtype),
            ("kernel, op", case.kernel, case.op),
            ("kernel, place", case.kernel, case.shift, case.in_place, case.uneven),
            ("kernel, numel", case.kernel, case.numel),
        }
        if not pairs <= seen:
            seen |= pairs
            chosen.append(case)
    return chosen


def cases_for(world_size: int) -> list[Case]:
    """Without PYCOLL_TEST_FULL a group gets its share of the sample: four ranks take as long as ten times two."""
    if FULL:
        return all_cases()[world_size - 2 :: 3]
    chosen = sample()
    shares = {2: [case for i, case in enumerate(chosen) if i % 10 < 8], 3: chosen[8::10]}
    return {**shares, 4: chosen[9::10]}[world_size]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_matrix(interpreted: Pools, world_size: int) -> None:
    cases = cases_for(world_size)
    assert len(cases) > 10
    for rank, failures in enumerate(
        interpreted(world_size).run(triton_ranks.run_cases, cases, timeout=6000 if FULL else 300)
    ):
        text = "\n".join(f"{name}: {what}" for name, what in failures.items())
        assert not failures, f"rank {rank}: {len(failures)} of {len(cases)}\n{text}"


@pytest.mark.slow
def test_a_group_of_one(interpreted: Pools) -> None:
    cases = [
        Case(kernel, torch.bfloat16, "avg", 97, 0, False, False)
        for kernel in triton_trials.KERNELS[:4]
    ]
    cases.append(Case("all_gather", torch.bfloat16, "sum", 97, 0, False, False))
    assert interpreted(1).run(triton_ranks.run_cases, cases) == [{}]


@pytest.mark.slow
def test_epochs_wrap_around(interpreted: Pools) -> None:
    assert interpreted(3).run(triton_ranks.epochs_wrap_around) == [{}] * 3


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
def test_a_late_rank_is_named(interpreted: Pools, algorithm: str) -> None:
    results = interpreted(3).run(triton_ranks.late_rank, algorithm)
    for rank in (0, 2):
        text, record = results[rank]
        assert f"rank {rank} waited in vain for rank" in text
        assert record[:4] == [1, 1, rank, record[3]]  # a deadline, in the meeting
    # Rank 1 did not come; ranks 0 and 2 have met one another.
    assert [results[rank][1][3] for rank in (0, 2)] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
def test_a_mismatch_is_seen_before_output_is_written(interpreted: Pools, algorithm: str) -> None:
    for text, is_untouched in interpreted(3).run(triton_ranks.mismatch, algorithm):
        assert "does not call what rank" in text
        assert is_untouched


@pytest.mark.slow
def test_an_aborted_group(interpreted: Pools) -> None:
    assert interpreted(2).run(triton_ranks.aborted) == [True, True]


# ---- kernels that know no ranks

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
MOVED = (torch.float64, torch.int8, torch.int16, torch.int64, torch.bool, torch.complex64)


@pytest.mark.slow
def test_buckets(interpreted: Pools) -> None:
    """The same bits as pycoll.ops gives on the CPU."""
    pairs = list(itertools.product(FLOATS, FLOATS))
    if not FULL:
        pairs = pairs[::3]
    pairs += [(dtype, dtype) for dtype in MOVED]
    assert interpreted(1).run(
        triton_ranks.by_interpreter, triton_trials.moved_buckets, pairs, timeout=300
    ) == [[]]


@pytest.mark.slow
def test_amax_and_device_scale(interpreted: Pools) -> None:
    ((largest, with_nan, is_scaled),) = interpreted(1).run(
        triton_ranks.by_interpreter, triton_trials.scales_and_amax
    )
    assert largest == 700.0
    assert with_nan != with_nan
    assert is_scaled


@pytest.mark.slow
def test_quantisation(interpreted: Pools) -> None:
    """The same codes and scales as pycoll.ops gives on the CPU, whose error bound test_ops.py holds."""
    codes = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    pairs = list(itertools.product(FLOATS[:3], codes))
    sizes = [(1009, 128), (331, 17), (384, 64), (100, 1000), (333, 333), (1, 16)]
    assert interpreted(1).run(
        triton_ranks.by_interpreter, triton_trials.quantised_blocks, pairs, sizes, timeout=300
    ) == [[]]
