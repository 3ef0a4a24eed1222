"""Tensors that peers reach directly: every collective on them, by each path and by mixtures of paths.

The matrix's cases with tensors that do not fit beside the signal run again here, with their memory in
other places. What the default does with plain tensors is `test_collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import generator
import pytest
import torch
import torch.distributed as dist
from case_runner import BACKEND, MEMORY, failures_of, reduce_scatter_tensor
from checker import assert_same_bits

import pycoll
from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]

pytestmark = pytest.mark.skipif(BACKEND != "pycoll", reason="memory of pycoll")

LARGE = ("4099", "65537", "1000003")
NUMEL = 100003  # prime; float32: above the limit of every path


def large_cases(world_size: int) -> list[generator.Case]:
    return [c for c in generator.sample() if c.world_size == world_size and c.numel in LARGE]


@pytest.mark.parametrize("memory", [name for name in MEMORY if name != "plain"])
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_matrix(pool: Pools, world_size: int, memory: str) -> None:
    cases = large_cases(world_size)
    assert len(cases) >= 10
    failures = failures_of(pool(world_size), cases, memory)
    assert not failures, "\n".join(f"{name}\n{text}" for name, text in failures.items())


# --- which path is taken ---------------------------------------------------------------------------


def filled(numel: int, shared: bool, salt: int = 0) -> torch.Tensor:
    """Whole numbers that depend on position and rank; their sums are exact."""
    make = pycoll.symmetric_empty if shared else torch.empty
    tensor = make(numel, dtype=torch.float32)
    return tensor.copy_((torch.arange(numel) * 7 + dist.get_rank() * 13 + salt) % 251)


def sum_of_all(numel: int) -> torch.Tensor:
    ranks = range(dist.get_world_size())
    return sum(((torch.arange(numel) * 7 + r * 13) % 251).float() for r in ranks)


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "all_reduce": lambda x, whole: dist.all_reduce(x),
    "reduce": lambda x, whole: dist.reduce(x, 1),
    "broadcast": lambda x, whole: dist.broadcast(x, 1),
    "all_gather": lambda x, whole: dist.all_gather(list(whole.chunk(dist.get_world_size())), x),
    "reduce_scatter": lambda x, whole: reduce_scatter_tensor(x, whole),
    "all_to_all": lambda x, whole: dist.all_to_all_single(torch.empty_like(whole), whole),
    "gather": lambda x, whole: dist.gather(
        x, list(whole.chunk(dist.get_world_size())) if dist.get_rank() == 1 else None, 1
    ),
    "scatter": lambda x, whole: dist.scatter(
        x, list(whole.chunk(dist.get_world_size())) if dist.get_rank() == 1 else None, 1
    ),
}


def paths_taken(shared_ranks: list[int]) -> dict[str, str]:
    shared = dist.get_rank() in shared_ranks
    x, whole = filled(NUMEL, shared), filled(NUMEL * dist.get_world_size(), shared)
    taken = {}
    for name, call in CALLS.items():
        call(x, whole)
        taken[name] = pycoll.events()[-1]["memory_path"]
    return taken


@pytest.mark.parametrize(
    ("shared_ranks", "path"), [([0, 1, 2], "mapped"), ([1], "readv"), ([], "readv")]
)
def test_the_path_is_in_the_events(pool: Pools, shared_ranks: list[int], path: str) -> None:
    for taken in pool(3).run(paths_taken, shared_ranks):
        staged_for_want_of_gain = {"reduce_scatter": "staged"} if path == "readv" else {}
        assert taken == dict.fromkeys(CALLS, path) | staged_for_want_of_gain


def paths_of_sizes() -> list[str]:
    taken = []
    for x in (torch.zeros(5), torch.zeros(8009), pycoll.symmetric_empty(8009).zero_()):
        dist.all_reduce(x)
        taken.append(pycoll.events()[-1]["memory_path"])
    dist.all_reduce(
        pycoll.symmetric_empty(NUMEL, 2).zero_()[:, 1]
    )  # not contiguous: a copy stands in
    return [*taken, pycoll.events()[-1]["memory_path"]]


def test_small_and_scattered_tensors_take_other_paths(pool: Pools) -> None:
    for taken in pool(2).run(paths_of_sizes):
        assert taken == ["payload", "staged", "mapped", "readv"]


def test_nothing_is_written_for_a_mismatch(pool: Pools) -> None:
    for text, untouched in pool(2).run(mismatch_on_shared):
        assert "called all_reduce(100003 x float32, SUM)" in text
        assert untouched


def mismatch_on_shared() -> tuple[str, bool]:
    x = filled(NUMEL + dist.get_rank(), shared=True)
    before = x.clone()
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        return str(error), torch.equal(x, before)
    return "", False


# --- the memory outlives groups --------------------------------------------------------------------


def use_in_several_groups() -> None:
    """Made before the group exists; views; a group of some; a group that comes after another has gone."""
    x = filled(NUMEL + 64, shared=True)
    assert pycoll.is_shared(x)
    assert pycoll.is_shared(x[3:])
    assert not pycoll.is_shared(torch.ones(3))
    for _ in range(2):
        group = dist.new_group()
        part = x[17 : 17 + NUMEL]
        part.copy_(filled(NUMEL, shared=False))
        edges = x[:17].clone(), x[17 + NUMEL :].clone()
        dist.all_reduce(part, group=group)
        assert pycoll.events(group)[-1]["memory_path"] == "mapped"
        assert_same_bits(part, sum_of_all(NUMEL))
        assert torch.equal(x[:17], edges[0])
        assert torch.equal(x[17 + NUMEL :], edges[1])
        dist.destroy_process_group(group)


def test_all_groups_use_the_memory(pool: Pools) -> None:
    assert pool(3).run(use_in_several_groups) == [None] * 3


# --- arguments -------------------------------------------------------------------------------------


class Extent:
    """As numpy's integers are: no int, but as good as one."""

    def __index__(self) -> int:
        return 3


def test_sizes_are_those_of_torch() -> None:
    make: Any = pycoll.symmetric_empty
    assert make().shape == ()
    for size in (((),), (3,), (Extent(), 2), ((3, Extent()),), ([3, 2],), (torch.Size([0, 3]),)):
        assert make(*size).shape == torch.empty(*size).shape


@pytest.mark.parametrize("size", [(1.5,), ("abc",), ((2,), 3), ((2, 3.0),), (None,)])
def test_what_is_no_size_is_named(size: Any) -> None:
    make: Any = pycoll.symmetric_empty
    with pytest.raises(TypeError, match=r"size is .*; pass whole numbers, or one tuple or list"):
        make(*size)


def test_what_is_no_dtype_is_named() -> None:
    make: Any = pycoll.symmetric_empty
    with pytest.raises(TypeError, match=r"dtype is 'float32', a str; pass a torch.dtype"):
        make(3, dtype="float32")


def register_on_the_cpu() -> str:
    try:
        pycoll.register_symmetric(pycoll.symmetric_empty(3))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_cpu_tensors_need_no_registration(pool: Pools) -> None:
    for text in pool(2).run(register_on_the_cpu):
        assert "tensor is on cpu, but only those of GPUs have to be registered" in text
