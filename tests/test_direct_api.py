"""pycoll.all_reduce and its siblings: the same results as torch.distributed, and what its functions refuse."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import pycoll
from pycoll.testing import RankPool

Pool = Callable[[int], RankPool]


def content(numel: int, rank: int, chunk: int = 0) -> torch.Tensor:
    return ((torch.arange(numel) * 7 + rank * 13 + chunk * 5) % 251).float()


def everything(numel: int, async_op: bool) -> bool:
    rank, n = dist.get_rank(), dist.get_world_size()
    ranks = range(n)

    def done(work: dist.Work | None) -> None:
        assert (work is not None) == async_op
        if work is not None:
            work.wait()

    total = sum(content(numel, r) for r in ranks)
    x = content(numel, rank)
    done(pycoll.all_reduce(x, async_op=async_op))
    assert torch.equal(x, total)
    x = content(numel, rank)
    done(pycoll.reduce(x, 1, op="max", async_op=async_op))
    most = torch.stack([content(numel, r) for r in ranks]).amax(0)
    assert torch.equal(x, most if rank == 1 else content(numel, rank))
    x = content(numel, rank)
    done(pycoll.broadcast(x, n - 1, async_op=async_op))
    assert torch.equal(x, content(numel, n - 1))
    outputs = [torch.empty(numel + r) for r in ranks]
    done(pycoll.all_gather(outputs, content(numel + rank, rank), async_op=async_op))
    assert all(torch.equal(outputs[r], content(numel + r, r)) for r in ranks)
    whole = torch.empty(n * numel)
    done(pycoll.all_gather_into_tensor(whole, content(numel, rank), async_op=async_op))
    assert torch.equal(whole, torch.cat([content(numel, r) for r in ranks]))
    part = torch.empty(numel)
    done(pycoll.reduce_scatter(part, [content(numel, rank, r) for r in ranks], async_op=async_op))
    assert torch.equal(part, sum(content(numel, r, rank) for r in ranks))
    done(pycoll.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG, async_op=async_op))
    assert torch.equal(part, content(numel, rank))
    gathered = [torch.empty(numel) for _ in ranks] if rank == 0 else None
    done(pycoll.gather(gathered, content(numel, rank), 0, async_op=async_op))
    assert gathered is None or all(torch.equal(gathered[r], content(numel, r)) for r in ranks)
    scattered = [content(numel, 0, r) for r in ranks] if rank == 0 else None
    done(pycoll.scatter(part, scattered, 0, async_op=async_op))
    assert torch.equal(part, content(numel, 0, rank))
    outputs = [torch.empty(numel) for _ in ranks]
    done(pycoll.all_to_all(outputs, [content(numel, rank, r) for r in ranks], async_op=async_op))
    assert all(torch.equal(outputs[r], content(numel, r, rank)) for r in ranks)
    sent = torch.cat([content(numel, rank, r) for r in ranks])
    done(pycoll.all_to_all_single(whole, sent, async_op=async_op))
    assert torch.equal(whole, torch.cat([content(numel, r, rank) for r in ranks]))
    done(pycoll.barrier(async_op=async_op))
    return True


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("numel", [3, 50_021])
def test_every_function(pool: Pool, numel: int, async_op: bool) -> None:
    assert all(pool(3).run(everything, numel, async_op))


def refused_elsewhere() -> tuple[complex, complex]:
    z = torch.tensor([1 + 2j]) * (dist.get_rank() + 1)
    product = z.clone()
    pycoll.all_reduce(product, op="product")
    conjugated = z.clone()
    pycoll.all_reduce(conjugated.conj())
    return product.item(), conjugated.item()


def test_complex_products_and_conjugated_views(pool: Pool) -> None:
    # Adding conjugates adds the numbers: the view's base holds 3 + 6j.
    assert pool(2).run(refused_elsewhere) == [(-6 + 8j, 3 + 6j)] * 2


def late(wait_all_ranks: bool) -> str:
    pycoll.monitored_barrier()
    if dist.get_rank() in (1, 2):
        dist.barrier()  # the others come here when they have given up
        pycoll.monitored_barrier()
        return ""
    try:
        pycoll.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=wait_all_ranks)
        text = "nothing was raised"
    except RuntimeError as error:
        text = str(error)
    dist.barrier()
    pycoll.monitored_barrier()  # it may be repeated
    return text


def test_monitored_barrier_names_the_late_ranks_and_may_be_repeated(pool: Pool) -> None:
    zero, _, _, three = pool(4).run(late, True)
    for text in (zero, three):
        assert "Ranks 1, 2 failed to pass monitoredBarrier in 1000 ms" in text
    zero, _, _, three = pool(4).run(late, False)
    for text in (zero, three):
        assert "Rank 1 failed to pass monitoredBarrier in 1000 ms" in text


def test_unknown_ops_are_named() -> None:
    with pytest.raises(ValueError, match="op 'median' is none of sum, avg, product"):
        pycoll.all_reduce(torch.ones(1), op="median")


def other_backend() -> str:
    group = dist.new_group(backend="gloo")
    try:
        pycoll.all_reduce(torch.ones(1), group=group)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_groups_of_another_backend_are_refused(pool: Pool) -> None:
    for text in pool(2).run(other_backend):
        assert "is ProcessGroupGloo, not pycoll's" in text


def roots_of_a_subgroup() -> list[float]:
    """Of ranks 0, 1, 2: what rank 2 has, whether it is named as in the world or as in the group."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    named_by_world, named_by_group = torch.full((3,), float(dist.get_rank())), torch.zeros(3)
    named_by_group += dist.get_rank()
    pycoll.broadcast(named_by_world, 2, group)
    pycoll.broadcast(named_by_group, group=group, group_src=1)
    total = torch.ones(3)
    pycoll.reduce(total, 2, group=group)
    return [named_by_world[0].item(), named_by_group[-1].item(), total[1].item()]


def test_roots_are_ranks_of_the_world_as_in_torch(pool: Pool) -> None:
    assert pool(3).run(roots_of_a_subgroup) == [[], [2.0, 2.0, 1.0], [2.0, 2.0, 2.0]]


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match="op is a int"):
        pycoll.all_reduce(torch.ones(1), op=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="src is a str"):
        pycoll.broadcast(torch.ones(1), "0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"either src .* or group_src"):
        pycoll.broadcast(torch.ones(1), 0, group_src=0)
    with pytest.raises(TypeError, match="group is -100"):
        pycoll.all_reduce(torch.ones(1), group=-100)  # type: ignore[arg-type]
    for wrong in ({"timeout": 3.0}, {"algorithm": 3}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            pycoll.Options(**wrong)  # type: ignore[arg-type]
