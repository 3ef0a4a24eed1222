"""The matrix on real ranks, against the reference; and forms of calls that are not on its axes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import generator
import pytest
import torch
import torch.distributed as dist
from case_runner import all_gather_into_tensor, failures_of, reduce_scatter_tensor
from checker import assert_same_bits, complement
from generator import Case

from pycoll import reference
from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]

# So many that a call to the ranks costs little, and so few that it ends well before its timeout.
CASES_PER_BATCH = 50


def batches() -> Iterator[tuple[str, list[Case]]]:
    """Name and cases of every test of the matrix: one form, one world size."""
    is_full = os.environ.get("PYCOLL_TEST_FULL") == "1"
    by_form: dict[str, list[Case]] = {}
    for case in generator.full() if is_full else generator.sample():
        by_form.setdefault(f"{case.form}-{case.world_size}", []).append(case)
    for name, cases in sorted(by_form.items()):
        for start in range(0, len(cases), CASES_PER_BATCH):
            suffix = f"-from-{start}" if len(cases) > CASES_PER_BATCH else ""
            yield name + suffix, cases[start : start + CASES_PER_BATCH]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # In a hook rather than at import: ranks import this module too, and need no list of cases.
    if "batch" in metafunc.fixturenames:
        params = []
        for name, cases in batches():
            marks = [pytest.mark.slow] if cases[0].world_size > 3 else []
            params.append(pytest.param(cases, id=name, marks=marks))
        metafunc.parametrize("batch", params)


def expect_no_failures(pool: RankPool, cases: Sequence[Case]) -> None:
    failures = failures_of(pool, cases)
    texts = [f"{name}\n{indented(text)}" for name, text in failures.items()]
    if failures:
        summary = f"{len(failures)} of {len(cases)} cases failed:\n"
        pytest.fail(summary + "\n".join(texts), pytrace=False)


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


# --- on ranks --------------------------------------------------------------------------------------


def gather_and_scatter_stacked() -> None:
    """Tensors of one dim more than their parts: (n, 2, 3) instead of (n * 2, 3)."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = [torch.arange(6.0).reshape(2, 3) + 10 * r for r in range(n)]
    stacked = torch.stack(rows)
    output = complement(stacked)
    all_gather_into_tensor(output, rows[rank])
    assert_same_bits(output, stacked, "gathered")
    part = complement(rows[0])
    reduce_scatter_tensor(part, stacked.clone())
    assert_same_bits(part, rows[rank] * n, "scattered")


def reduce_in_storage_order(shapes: list[tuple[int, ...]]) -> list[float]:
    """Ranks may see the same number of elements in different shapes."""
    tensor = torch.arange(6.0).reshape(shapes[dist.get_rank()])
    dist.all_reduce(tensor)
    return tensor.flatten().tolist()


# --- tests -----------------------------------------------------------------------------------------


def test_matrix(pool: Pools, batch: list[Case]) -> None:
    expect_no_failures(pool(batch[0].world_size), batch)


@pytest.mark.parametrize("form", ["all_reduce", "reduce", "reduce_scatter_tensor"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_op_on_every_dtype(pool: Pools, form: str, world_size: int) -> None:
    cases = [
        Case(form, str(dtype)[6:], op, "offset", str(world_size), "auto", "1025", "sync")
        for dtype in generator.DTYPES
        for op in reference.OPS
        if reference.is_valid(op, dtype)
    ]
    expect_no_failures(pool(world_size), cases)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stacked_tensors(pool: Pools, world_size: int) -> None:
    assert pool(world_size).run(gather_and_scatter_stacked) == [None] * world_size


def test_shapes_may_differ_where_sizes_do_not(pool: Pools) -> None:
    for values in pool(2).run(reduce_in_storage_order, [(2, 3), (3, 2)]):
        assert values == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
