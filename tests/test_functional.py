"""Functional collectives: values, gradients, and both under torch.compile.

torch has two families: `_functional_collectives`, which compilers see, and `distributed.nn.functional`.
Gradients are checked against the definition of an adjoint: whatever x and g are, the sum over all
ranks of <f(x), g> is the sum over all ranks of <x, f's gradient for g>. Everything is a whole number,
so the two are equal and not only close.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from case_data import contribution
from checker import assert_same_bits
from torch import Tensor

from pycoll import reference
from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]
Map = Callable[[Tensor], Sequence[Tensor]]

ROWS = 6  # of every tensor that is differentiated: a multiple of 1, 2 and 3


# --- on ranks --------------------------------------------------------------------------------------


def call_functional_collectives(dtype: torch.dtype, numel: int) -> None:
    rank, n, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    rows = [
        contribution(dtype, "sum", numel * n, rank=r, world_size=n, exact=True) for r in range(n)
    ]
    mine = rows[rank].clone()
    total = reference.reduce_ranks(rows)
    gathered = torch.cat(rows)
    own = slice(rank * numel, (rank + 1) * numel)

    def same(result: Any, expected: Tensor, what: str) -> None:
        assert_same_bits(functional.wait_tensor(result), expected, what)

    same(functional.all_reduce(mine, "sum", world), total, "all_reduce")
    same(functional.all_gather_tensor(mine, 0, world), gathered, "all_gather_tensor")
    same(
        functional.reduce_scatter_tensor(mine, "sum", 0, world), total[own], "reduce_scatter_tensor"
    )
    same(functional.broadcast(mine, n - 1, world), rows[n - 1], "broadcast")
    for result in functional.all_reduce_coalesced([mine, mine], "sum", world):
        same(result, total, "all_reduce_coalesced")
    for result in functional.all_gather_into_tensor_coalesced([mine, mine], world):
        same(result, gathered, "all_gather_into_tensor_coalesced")
    for result in functional.reduce_scatter_tensor_coalesced([mine, mine], "sum", [0, 0], world):
        same(result, total[own], "reduce_scatter_tensor_coalesced")
    exchanged = torch.cat([row[own] for row in rows])
    same(functional.all_to_all_single(mine, None, None, world), exchanged, "all_to_all_single")
    splits = [numel * n if other == (rank + 1) % n else 0 for other in range(n)]
    sources = [numel * n if (other + 1) % n == rank else 0 for other in range(n)]
    moved = functional.all_to_all_single(mine, sources, splits, world)
    same(moved, rows[rank - 1], "all_to_all_single, uneven")
    onwards = [(source + 1) % n for source in range(n)]
    same(functional.permute_tensor(mine, onwards, world), rows[rank - 1], "permute_tensor")
    assert_same_bits(mine, rows[rank], "input")


def use_results_that_are_not_there_yet(numel: int) -> None:
    """Results wait for themselves when somebody looks; what nobody looks at is dropped."""
    rank, n, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    total = n * (n + 1) / 2
    for step in range(20):
        x = torch.full((numel,), rank + 1.0 + step)
        result = functional.all_reduce(x, "sum", world)
        functional.all_reduce(x * 2, "sum", world)
        viewed = result.view(-1, 1)[1:]
        gathered = functional.all_gather_tensor(result, 0, world)
        assert (viewed + 1 == total + n * step + 1).all()
        assert gathered.sum() == n * numel * (total + n * step)
    with torch.no_grad():
        assert (functional.all_reduce(x, "avg", world) == total / n + step).all()


def maps_of_functional() -> dict[str, Map]:
    n, world = dist.get_world_size(), dist.group.WORLD
    rank = dist.get_rank()
    part = ROWS // n
    # Rank r keeps one row more than it sends to the next one.
    uneven = [0] * n
    uneven[(rank + 1) % n] = 2
    uneven[rank] += ROWS - 2
    sources = [0] * n
    sources[(rank - 1) % n] = 2
    sources[rank] += ROWS - 2
    return {
        "all_reduce": lambda x: [functional.all_reduce(x, "sum", world)],
        "all_gather": lambda x: [functional.all_gather_tensor(x, 0, world)],
        "all_gather, dim 1": lambda x: [functional.all_gather_tensor(x, 1, world)],
        "reduce_scatter": lambda x: [functional.reduce_scatter_tensor(x, "sum", 0, world)],
        "reduce_scatter, dim 1": lambda x: [
            functional.reduce_scatter_tensor(x.repeat(1, n), "sum", 1, world)
        ],
        "all_to_all": lambda x: [functional.all_to_all_single(x, [part] * n, [part] * n, world)],
        "all_to_all, uneven": lambda x: [functional.all_to_all_single(x, sources, uneven, world)],
        "two": lambda x: [
            functional.all_reduce(functional.all_gather_tensor(x, 0, world) * 2, "sum", world)
        ],
    }


def maps_of_nn() -> dict[str, Map]:
    import torch.distributed.nn.functional as nn_functional

    n, last = dist.get_world_size(), dist.get_world_size() - 1

    def all_to_all_single(x: Tensor) -> list[Tensor]:
        return [nn_functional.all_to_all_single(torch.empty_like(x), x)]

    return {
        "all_reduce": lambda x: [nn_functional.all_reduce(x)],
        "all_reduce, average": lambda x: [nn_functional.all_reduce(x, dist.ReduceOp.AVG) * n],
        "all_gather": nn_functional.all_gather,
        "broadcast": lambda x: [nn_functional.broadcast(x, last)],
        "reduce": lambda x: [nn_functional.reduce(x, last)],
        "gather": lambda x: nn_functional.gather(x, last),
        "scatter": lambda x: [nn_functional.scatter(list(x.chunk(n)), last)],
        "reduce_scatter": lambda x: [
            nn_functional.reduce_scatter(torch.empty(ROWS // n, 2).double(), list(x.chunk(n)))
        ],
        "all_to_all": lambda x: nn_functional.all_to_all(
            [torch.empty(ROWS // n, 2).double() for _ in range(n)], list(x.chunk(n))
        ),
        "all_to_all_single": all_to_all_single,
    }


def pairing(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The inner product, summed over all ranks."""
    products = [(x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)]
    total = torch.stack([torch.zeros(()).double(), *products]).sum()
    dist.all_reduce(total)
    return total.item()


def ramp(shape: torch.Size, salt: int) -> Tensor:
    numbers = torch.arange(shape.numel()) * 7 + dist.get_rank() * 13 + salt * 29
    return (numbers % 31 - 15).double().reshape(shape)


def compare_with_adjoint(name: str, of_nn: bool) -> None:
    f = (maps_of_nn() if of_nn else maps_of_functional())[name]
    # Results of these are for the last rank; what the others hold has no meaning.
    here = name not in ("reduce", "gather") or dist.get_rank() == dist.get_world_size() - 1
    for strides in ((2, 1), (1, ROWS)):
        x = torch.empty_strided((ROWS, 2), strides).double().copy_(ramp(torch.Size((ROWS, 2)), 1))
        x.requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch prefers the other family
            outputs = f(x)
            upstream = [ramp(y.shape, 2) * here for y in outputs]
            torch.autograd.backward(outputs, upstream)
        assert x.grad is not None
        of_values = pairing([y.detach() for y in outputs], upstream)
        assert of_values == pairing([x.detach()], [x.grad])
        assert of_values != 0


def gradients_by_hand() -> list[list[float]]:
    import torch.distributed.nn.functional as nn_functional

    rank, n, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    upstream = torch.tensor([rank + 1.0])

    def gradient(f: Callable[[Tensor], Tensor], grad: Tensor) -> list[float]:
        x = torch.full((2,), rank + 1.0, requires_grad=True)
        f(x).backward(grad)
        assert x.grad is not None
        return x.grad.tolist()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            gradient(lambda x: functional.all_reduce(x, "sum", world), upstream.repeat(2)),
            gradient(lambda x: functional.all_reduce(x, "sum", world), upstream.expand(2)),
            gradient(lambda x: functional.all_gather_tensor(x, 0, world), upstream.expand(2 * n)),
            gradient(lambda x: nn_functional.all_reduce(x), upstream.expand(2)),
            gradient(lambda x: nn_functional.all_reduce(x, dist.ReduceOp.AVG), upstream.expand(2)),
            gradient(
                lambda x: torch.cat(nn_functional.all_gather(x)),
                upstream.expand(2 * n).contiguous(),
            ),
        ]


def reduce_a_transposed_tensor() -> list[list[float]]:
    """As a helper of tensor parallelism does, that must not return what it was given."""
    import torch.distributed.nn.functional as nn_functional

    x = torch.full((2, 3), dist.get_rank() + 1.0).t()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [functional.all_reduce(x, "sum", dist.group.WORLD), nn_functional.all_reduce(x)]
    assert all(result.shape == (3, 2) for result in results)
    return [result.flatten().tolist() for result in results]


def compiled_forward_and_backward(backend: str) -> list[list[float]]:
    """A layer that gathers its input, multiplies, and scatters the sum; and its gradients."""
    rank, n, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        whole = functional.all_gather_tensor(x, 0, world)
        part = functional.reduce_scatter_tensor(whole @ weight, "sum", 0, world)
        exchanged = functional.all_to_all_single(part, [1] * n, [1] * n, world)
        return functional.all_reduce(exchanged * 2, "sum", world) + 1

    results = []
    for f in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        x = ramp(torch.Size((n, 4)), 1).float().requires_grad_()
        weight = ramp(torch.Size((4, 4)), 2).float().requires_grad_()
        y = f(x, weight)
        y.backward(ramp(torch.Size((n, 4)), 3).float())
        assert x.grad is not None
        assert weight.grad is not None
        results.append([*y.flatten().tolist(), *x.grad.flatten().tolist()])
        results[-1] += weight.grad.flatten().tolist()
    assert len(set(results[0])) > rank + 3
    return results


def compiled_in_place(backend: str) -> list[Any]:
    n = dist.get_world_size()

    def doubled(y: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        y = y * 2
        dist.all_reduce(y)
        dist.all_gather_into_tensor(whole, y)
        return y + 1, whole * 1

    compiled = torch.compile(doubled, fullgraph=True, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        total, whole = compiled(torch.full((3,), dist.get_rank() + 1.0), torch.zeros(3 * n))
    return [total.tolist(), whole.unique().tolist()]


# --- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_functional_collectives(pool: Pools, world_size: int, dtype: torch.dtype) -> None:
    for numel in (1, 1009):
        results = pool(world_size).run(call_functional_collectives, dtype, numel)
        assert results == [None] * world_size


@pytest.mark.parametrize("numel", [17, 70_001])
def test_results_wait_for_themselves(pool: Pools, numel: int) -> None:
    assert pool(2).run(use_results_that_are_not_there_yet, numel) == [None, None]


NAMES_OF_FUNCTIONAL = (
    *("all_reduce", "all_gather", "all_gather, dim 1", "reduce_scatter", "reduce_scatter, dim 1"),
    *("all_to_all", "all_to_all, uneven", "two"),
)
NAMES_OF_NN = (
    *(
        "all_reduce",
        "all_reduce, average",
        "all_gather",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
    ),
    *("reduce_scatter", "all_to_all", "all_to_all_single"),
)


@pytest.mark.parametrize("name", NAMES_OF_FUNCTIONAL)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_adjoint(pool: Pools, world_size: int, name: str) -> None:
    assert pool(world_size).run(compare_with_adjoint, name, False) == [None] * world_size


@pytest.mark.parametrize("name", NAMES_OF_NN)
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_of_nn_functional_are_adjoint(pool: Pools, world_size: int, name: str) -> None:
    assert pool(world_size).run(compare_with_adjoint, name, True) == [None] * world_size


def test_gradients_worked_out_by_hand(pool: Pools) -> None:
    """Others drop the gradient of an upstream that is not contiguous, or refuse averages."""
    for reduced, expanded, gathered, of_nn, averaged, listed in pool(2).run(gradients_by_hand):
        assert reduced == expanded == gathered == of_nn == listed == [3.0, 3.0]
        assert averaged == [1.5, 1.5]


def test_a_transposed_tensor_is_reduced(pool: Pools) -> None:
    """Others reduce a contiguous copy, and return the tensor that they were given."""
    assert pool(2).run(reduce_a_transposed_tensor) == [[[3.0] * 6] * 2] * 2


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.full])],
)
def test_compiled_layers_compute_what_eager_ones_do(pool: Pools, backend: str) -> None:
    for eager, compiled in pool(2).run(compiled_forward_and_backward, backend, timeout=240):
        assert compiled == eager


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_in_place_collectives_in_a_compiled_function(pool: Pools, backend: str) -> None:
    assert pool(2).run(compiled_in_place, backend, timeout=240) == [[[7.0] * 3, [6.0]]] * 2
