"""The matrix on real ranks, against the reference; and what its axes do not reach."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import generator
import pytest
from case_runner import failures_of
from generator import AXES, Case

from pycoll import reference
from pycoll.testing import RankPool

IS_FULL = os.environ.get("PYCOLL_TEST_FULL") == "1"
WORLD_SIZES = (1, 2, 3, 4, 8) if IS_FULL else (1, 2, 3, 4)
# So many that starting a batch costs little, and so few that one ends well before its timeout.
CASES_PER_BATCH = 100

Pools = Callable[[int], RankPool]


@functools.cache
def matrix() -> dict[tuple[str, int], list[Case]]:
    """The cases by form and world size."""
    cases: dict[tuple[str, int], list[Case]] = {}
    for case in generator.full() if IS_FULL else generator.sample():
        cases.setdefault((case.form, case.world_size), []).append(case)
    return cases


def expect_no_failures(pool: RankPool, cases: Sequence[Case]) -> None:
    failures: dict[str, str] = {}
    for start in range(0, len(cases), CASES_PER_BATCH):
        failures |= failures_of(pool, cases[start : start + CASES_PER_BATCH])
    if failures:
        texts = [
            f"{name}\n    {text.replace(chr(10), chr(10) + '    ')}"
            for name, text in failures.items()
        ]
        pytest.fail(
            f"{len(failures)} of {len(cases)} cases failed:\n" + "\n".join(texts), pytrace=False
        )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("form", AXES["form"])
def test_matrix(pool: Pools, form: str, world_size: int) -> None:
    if form == "send_recv" and world_size == 1:
        assert (form, world_size) not in matrix(), "excluded: a rank alone has nobody to send to"
        return
    expect_no_failures(pool(world_size), matrix()[form, world_size])


@pytest.mark.parametrize("form", ["all_reduce", "reduce_scatter_tensor"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_op_on_every_dtype(pool: Pools, form: str, world_size: int) -> None:
    cases = [
        Case(form, dtype, op, "offset", str(world_size), "auto", "1025", "sync")
        for dtype in AXES["dtype"]
        for op in reference.OPS
        if reference.is_valid(op, getattr(generator.torch, dtype))
    ]
    expect_no_failures(pool(world_size), cases)
