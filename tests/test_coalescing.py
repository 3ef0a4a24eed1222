"""Many calls as one: the coalescing manager, coalesced forms, batches of messages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_runner import all_gather_into_tensor, reduce_scatter_tensor
from checker import assert_same_bits
from torch import Tensor

from pycoll import collectives
from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]

NUMELS = (5, 0, 1, 4099, 70_001)
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.float32, torch.uint8)


# --- on ranks --------------------------------------------------------------------------------------


def values(numel: int, rank: int, part: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return ((torch.arange(numel) * 7 + rank * 3 + part * 5) % 11).to(dtype)


def rows_of(part: int, dtype: torch.dtype, times: int = 1) -> list[Tensor]:
    n = dist.get_world_size()
    return [values(times * NUMELS[part], rank, part, dtype) for rank in range(n)]


def coalesce_sums(dtypes: list[torch.dtype], group: Any, **how: Any) -> list[tuple[Any, Any]]:
    rank = dist.get_rank()
    pairs = []
    for part, dtype in enumerate(dtypes):
        rows = rows_of(part, dtype)
        pairs.append((rows[rank].clone(), torch.stack(rows).sum(0).to(dtype)))
    with dist._coalescing_manager(group, **how) as manager:
        for tensor, _ in pairs:
            dist.all_reduce(tensor, group=group)
    if how.get("async_ops"):
        manager.wait()
    return pairs


def coalesce_gathers(dtypes: list[torch.dtype], group: Any, **how: Any) -> list[tuple[Any, Any]]:
    rank, pairs = dist.get_rank(), []
    with dist._coalescing_manager(group, **how) as manager:
        for part, dtype in enumerate(dtypes):
            rows = rows_of(part, dtype)
            whole = torch.cat(rows)
            pairs.append((torch.zeros_like(whole), whole))
            all_gather_into_tensor(pairs[-1][0], rows[rank], group=group)
    if how.get("async_ops"):
        manager.wait()
    return pairs


def coalesce_scatters(dtypes: list[torch.dtype], group: Any, **how: Any) -> list[tuple[Any, Any]]:
    rank, n, pairs = dist.get_rank(), dist.get_world_size(), []
    with dist._coalescing_manager(group, **how) as manager:
        for part, dtype in enumerate(dtypes):
            rows = rows_of(part, dtype, times=n)
            total = torch.stack(rows).sum(0).to(dtype).chunk(n)[rank] if NUMELS[part] else rows[0]
            pairs.append((torch.zeros_like(total), total))
            reduce_scatter_tensor(pairs[-1][0], rows[rank], group=group)
    if how.get("async_ops"):
        manager.wait()
    return pairs


COALESCED = {
    "all_reduce": coalesce_sums,
    "all_gather": coalesce_gathers,
    "reduce_scatter": coalesce_scatters,
}


def coalesce(name: str, dtypes: list[torch.dtype], is_async: bool, of_group: bool) -> None:
    group = dist.new_group() if of_group else None
    for _ in range(3):
        for actual, expected in COALESCED[name](dtypes, group, async_ops=is_async):
            assert_same_bits(actual, expected, name)


def coalesce_on_a_device(name: str, is_async: bool) -> None:
    how = {"device": torch.device("cpu"), "async_ops": is_async}
    for actual, expected in COALESCED[name]([torch.float32] * len(NUMELS), None, **how):
        assert_same_bits(actual, expected, name)


def coalesce_what_is_not_coalesced() -> None:
    """Calls that the manager does not collect happen where they stand."""
    rank, n = dist.get_rank(), dist.get_world_size()
    sent, gathered, exchanged = values(7, rank, 0), [torch.zeros(7)] * 0, torch.zeros(n)
    gathered = [torch.zeros(7) for _ in range(n)]
    with dist._coalescing_manager():
        dist.broadcast(sent, 1)
        dist.all_gather(gathered, values(7, rank, 1))
        dist.all_to_all_single(exchanged, torch.full((n,), float(rank)))
    assert_same_bits(sent, values(7, 1, 0), "broadcast")
    for source in range(n):
        assert_same_bits(gathered[source], values(7, source, 1), "all_gather")
    assert exchanged.tolist() == list(range(n))
    with dist._coalescing_manager(async_ops=True):
        pass


def mix_in_one_manager() -> str:
    tensor = torch.ones(2)
    try:
        with dist._coalescing_manager():
            dist.all_reduce(tensor)
            all_gather_into_tensor(torch.zeros(2 * dist.get_world_size()), tensor)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def coalesce_lists(is_async: bool) -> None:
    """The deprecated functions that take lists."""
    rank, n = dist.get_rank(), dist.get_world_size()
    inputs = [values(numel, rank, part) for part, numel in enumerate(NUMELS)]
    sums = [tensor.clone() for tensor in inputs]
    outputs = [[torch.zeros(numel) for numel in NUMELS] for _ in range(n)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        works = [
            dist.all_gather_coalesced(outputs, inputs, async_op=is_async),
            dist.all_reduce_coalesced(sums, async_op=is_async),
        ]
    for work in works if is_async else ():
        work.wait()
    for part, numel in enumerate(NUMELS):
        rows = [values(numel, source, part) for source in range(n)]
        for source, row in enumerate(rows):
            assert_same_bits(outputs[source][part], row, "all_gather_coalesced")
        assert_same_bits(sums[part], torch.stack(rows).sum(0), "all_reduce_coalesced")


def coalesce_in_place() -> list[str]:
    """Inputs that are this rank's own part of their output; then one that lies elsewhere in an output of the list."""
    rank, n, errors = dist.get_rank(), dist.get_world_size(), []
    wholes = [torch.zeros(n * numel) for numel in NUMELS]
    parts = [whole.view(n, -1)[rank] if whole.numel() else whole for whole in wholes]
    for part, mine in enumerate(parts):
        mine.copy_(values(NUMELS[part], rank, part))
    # Not in the order of their addresses.
    collectives.all_gather_into_tensor_coalesced(wholes[::-1], parts[::-1])
    for part, whole in enumerate(wholes):
        assert_same_bits(whole, torch.cat(rows_of(part, torch.float32)), "all_gather")
    expected = [torch.stack(rows_of(part, torch.float32, n)).sum(0) for part in range(len(NUMELS))]
    for part, whole in enumerate(wholes):
        whole.copy_(values(whole.numel(), rank, part))
    collectives.reduce_scatter_tensor_coalesced(parts, wholes)
    for part, mine in enumerate(parts):
        total = expected[part].view(n, -1)[rank] if mine.numel() else mine
        assert_same_bits(mine, total, "reduce_scatter")

    last = wholes[-1]
    elsewhere = last[(n - 1 - rank) * NUMELS[-1] + 1 :][: NUMELS[0]]
    with_elsewhere = [elsewhere, *parts[1:-1], torch.zeros(NUMELS[-1])]
    for call in (
        lambda: collectives.all_gather_into_tensor_coalesced(wholes, with_elsewhere),
        lambda: collectives.reduce_scatter_tensor_coalesced(with_elsewhere, wholes),
    ):
        try:
            call()
            errors.append("nothing was raised")
        except ValueError as error:
            errors.append(str(error))
    return errors


def coalesce_thousands() -> None:
    """Pieces of odd sizes, more than one message holds, whose runs begin and end within pieces."""
    rank, n = dist.get_rank(), dist.get_world_size()
    numels = [part * 131 % 523 for part in range(3001)]
    inputs = [values(numel, rank, part) for part, numel in enumerate(numels)]
    gathered = [torch.full((n * numel,), -1.0) for numel in numels]
    collectives.all_gather_into_tensor_coalesced(gathered, inputs)
    scattered = [torch.full((numel,), -1.0) for numel in numels]
    collectives.reduce_scatter_tensor_coalesced(scattered, gathered)
    for part, numel in enumerate(numels):
        rows = [values(numel, source, part) for source in range(n)]
        assert_same_bits(gathered[part], torch.cat(rows), f"all_gather {part}")
        assert_same_bits(scattered[part], n * inputs[part], f"reduce_scatter {part}")


def batch_of_messages(shuffle: int) -> None:
    """Everybody sends to everybody, several messages a pair, listed in an order of its own."""
    rank, n = dist.get_rank(), dist.get_world_size()
    operations, expected = [], []
    for peer in (peer for peer in range(n) if peer != rank):
        for part, numel in enumerate(NUMELS):
            operations.append(dist.P2POp(dist.isend, values(numel, rank, part), peer))
            got = torch.full((numel,), -1.0)
            operations.append(dist.P2POp(dist.irecv, got, peer))
            expected.append((got, values(numel, peer, part)))
    # Among messages of one pair the order is the same on both sides; pairs may be in any order.
    start = 2 * len(NUMELS) * (shuffle % (n - 1)) if n > 1 else 0
    operations = operations[start:] + operations[:start]
    if shuffle % 2:
        operations.sort(key=lambda operation: operation.op is dist.isend)  # receives first
    works = dist.batch_isend_irecv(operations)
    for work in works[::-1]:
        work.wait()
    for got, right in expected:
        assert_same_bits(got, right, "message")


# --- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_group", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", COALESCED)
def test_the_manager_coalesces(pool: Pools, name: str, is_async: bool, of_group: bool) -> None:
    for world_size in (1, 3):
        for dtypes in ([torch.float32] * len(NUMELS), list(DTYPES)):
            results = pool(world_size).run(coalesce, name, dtypes, is_async, of_group)
            assert results == [None] * world_size


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", COALESCED)
def test_the_manager_coalesces_on_a_device(pool: Pools, name: str, is_async: bool) -> None:
    assert pool(2).run(coalesce_on_a_device, name, is_async) == [None, None]


def test_other_calls_within_the_manager(pool: Pools) -> None:
    assert pool(3).run(coalesce_what_is_not_coalesced) == [None] * 3


def test_different_calls_in_one_manager_are_refused_by_torch(pool: Pools) -> None:
    assert all("same type" in text for text in pool(2).run(mix_in_one_manager))
    pool(2).kill()  # torch keeps the calls, and would refuse the group's next manager


@pytest.mark.parametrize("is_async", [False, True])
def test_functions_that_take_lists(pool: Pools, is_async: bool) -> None:
    assert pool(3).run(coalesce_lists, is_async) == [None] * 3


def test_lists_in_place(pool: Pools) -> None:
    for errors in pool(3).run(coalesce_in_place):
        assert ["shares memory" in error for error in errors] == [True, True], errors


def test_thousands_of_tensors(pool: Pools) -> None:
    assert pool(3).run(coalesce_thousands) == [None] * 3


@pytest.mark.parametrize("shuffle", range(4))
@pytest.mark.parametrize("world_size", [2, 3])
def test_batches_of_messages(pool: Pools, world_size: int, shuffle: int) -> None:
    assert pool(world_size).run(batch_of_messages, shuffle) == [None] * world_size
