"""The backend's CUDA path on the simulator: the same host code, with CPU tensors in the place of CUDA's.

What the kernels compute is compared, bit by bit, with what the same calls give on the CPU: pycoll promises the same
order of additions on both. Streams run late and in a random order, so results also show whether the host code has put
all events where they belong.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checker import assert_same_bits
from simulated_device import SimulatedDevice
from simulated_kernels import library_path
from torch import Tensor

import pycoll
from pycoll.testing import RankPool, run_ranks, run_streams

pytestmark = pytest.mark.slow
Pools = Callable[[int], RankPool]

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.uint8, torch.complex64)
# One-shot, two-shot with part of a unit, several segments for each block.
NUMELS = (1, 61, 1009, 5003)


@pytest.fixture(scope="module", autouse=True)
def _simulator() -> None:
    """Compiled before ranks start, whose time is limited."""
    library_path()


@functools.cache
def device() -> SimulatedDevice:
    """This rank's."""
    return SimulatedDevice(seed=dist.get_rank() + 1)


def data(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of values that depend on rank and position."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * dist.get_rank() + numel)
    if dtype.is_complex:
        return torch.randn(numel, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def on_both(call: Callable[[], list[Tensor]]) -> None:
    """Runs it on the CPU, then on the device, and compares what it returns."""
    want = [tensor.clone() for tensor in call()]
    with device().active():
        got = call()
        device().synchronise()
    assert len(want) == len(got)
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y)


# --- values ---------------------------------------------------------------------------------------


def reductions(dtype: torch.dtype, numel: int) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.AVG]
    if not dtype.is_complex:
        ops += [dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX]

    def all_reduce(op: dist.ReduceOp) -> list[Tensor]:
        x = data(numel, dtype)
        dist.all_reduce(x, op)
        return [x]

    def reduce_scatter(op: dist.ReduceOp) -> list[Tensor]:
        out = torch.empty(numel, dtype=dtype)
        dist.reduce_scatter_tensor(out, data(n * numel, dtype), op)
        return [out]

    def reduce_scatter_list(op: dist.ReduceOp) -> list[Tensor]:
        out = torch.empty(numel + rank, dtype=dtype)
        dist.reduce_scatter(out, [data(numel + r, dtype, r) for r in range(n)], op)
        return [out]

    def reduce(op: dist.ReduceOp) -> list[Tensor]:
        x = data(numel, dtype)
        dist.reduce(x, n - 1, op)
        return [x] if rank == n - 1 else []

    for op in ops:
        on_both(lambda op=op: all_reduce(op))
    on_both(lambda: reduce_scatter(dist.ReduceOp.AVG))
    on_both(lambda: reduce_scatter_list(dist.ReduceOp.SUM))
    on_both(lambda: reduce(dist.ReduceOp.SUM))


def moves(dtype: torch.dtype, numel: int) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()

    def all_gather() -> list[Tensor]:
        whole = torch.empty(n * numel, dtype=dtype)
        dist.all_gather_into_tensor(whole, data(numel, dtype))
        parts = [torch.empty(numel + r, dtype=dtype) for r in range(n)]
        dist.all_gather(parts, data(numel + rank, dtype))
        return [whole, *parts]

    def from_and_to_a_root() -> list[Tensor]:
        x = data(numel, dtype)
        dist.broadcast(x, n - 1)
        parts = [torch.empty(numel, dtype=dtype) for _ in range(n)] if rank == 0 else None
        dist.gather(data(numel, dtype, 1), parts, dst=0)
        y = torch.empty(numel, dtype=dtype)
        dist.scatter(y, [data(numel, dtype, r) for r in range(n)] if rank == 1 else None, src=1)
        return [x, y, *(parts or [])]

    def all_to_all() -> list[Tensor]:
        sent = [(rank + 2 * r) % 5 * numel for r in range(n)]
        received = [(r + 2 * rank) % 5 * numel for r in range(n)]
        out = torch.empty(sum(received), dtype=dtype)
        dist.all_to_all_single(out, data(sum(sent), dtype), received, sent)
        outs = [torch.empty(size, dtype=dtype) for size in received]
        dist.all_to_all(outs, [data(size, dtype, r) for r, size in enumerate(sent)])
        return [out, *outs]

    on_both(all_gather)
    on_both(from_and_to_a_root)
    on_both(all_to_all)


@pytest.mark.parametrize("world_size", [2, 3])
def test_reductions(pool: Pools, world_size: int) -> None:
    for dtype, numel in zip(DTYPES, NUMELS * 2, strict=False):
        pool(world_size).run(reductions, dtype, numel)


@pytest.mark.parametrize("world_size", [2, 3])
def test_moves(pool: Pools, world_size: int) -> None:
    for dtype, numel in zip((*DTYPES, torch.float8_e4m3fnuz), NUMELS * 2, strict=False):
        pool(world_size).run(moves, dtype, numel)


def layouts_and_lists() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()

    def transposed() -> list[Tensor]:
        x = data(35, torch.float32).reshape(5, 7).t()
        dist.all_reduce(x)
        y = torch.empty(7, 5).t()
        dist.broadcast(y if rank else x, 0)
        return [x, y] if rank else [x]

    def coalesced() -> list[Tensor]:
        tensors = [data(k, torch.float32, k) for k in (3, 0, 700)]
        dist.all_reduce_coalesced(tensors)
        outs = [torch.empty(k) for k in (2, 300)]
        with dist._coalescing_manager():
            for out in outs:
                dist.reduce_scatter_tensor(out, data(n * out.numel(), torch.float32))
        return [*tensors, *outs]

    def empty() -> list[Tensor]:
        x, whole = torch.empty(0), torch.empty(0)
        dist.all_reduce(x)
        dist.all_gather_into_tensor(whole, x)
        return [x, whole]

    for call in (transposed, coalesced, empty):
        on_both(call)


def quantised() -> None:
    def call() -> list[Tensor]:
        x = data(3000, torch.float32)
        pycoll.all_reduce(x, wire_dtype=torch.float8_e4m3fn, block=128)
        small = data(64, torch.bfloat16)
        pycoll.all_reduce(small, wire_dtype=torch.int8, block=32)
        return [x, small]

    on_both(call)


def test_layouts_lists_and_wires(pool: Pools) -> None:
    pool(2).run(layouts_and_lists)
    pool(2).run(quantised)


# --- order ----------------------------------------------------------------------------------------


def produce_reduce_consume(seed: int) -> None:
    """Each step changes what the one before left; with an event missing some order gives another result."""
    dev, n = device(), dist.get_world_size()
    side = dev.new_stream()
    with dev.active():
        x, y, z = (torch.zeros(300) for _ in range(3))
        dev.call(lambda: x.fill_(dist.get_rank() + 1.0))
        first = dist.all_reduce(x, async_op=True)
        dev.call(lambda: y.fill_(7.0))  # beside it
        dist.all_reduce(y)  # in the current stream, behind the first one of the group
        first.wait()
        dev.call(lambda: z.copy_(x + y))
        second = dist.all_reduce(z, async_op=True)
        with dev.stream(side):
            second.wait()
            dev.call(lambda: z.mul_(2.0))
        assert torch.equal(x, torch.zeros(300)), "nothing runs before the host synchronises"
        dev.synchronise()
    total = n * (n + 1) / 2
    assert_same_bits(z, torch.full((300,), 2.0 * n * (total + 7.0 * n)))
    del seed


def drop_works() -> None:
    """Nobody waits and nobody keeps the tensors."""
    dev, results = device(), []
    with dev.active():
        for step in range(5):
            x = torch.full((500,), float(step))
            dist.all_reduce(x, async_op=True)
            results.append((x[:3], step))  # a view keeps the storage for the check only
            del x
        dev.synchronise()
    for view, step in results:
        assert_same_bits(view, torch.full((3,), float(step * dist.get_world_size())))


def futures_and_completion() -> None:
    dev = device()
    with dev.active():
        x = torch.ones(50)
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future().then(lambda f: f.value()[0] * 2)
        assert not work.is_completed()
        dev.synchronise()
        assert work.is_completed()
        assert work.exception() is None
        assert_same_bits(future.wait(), torch.full((50,), 2.0 * dist.get_world_size()))
        y = torch.ones(50)
        assert dist.all_reduce(y, async_op=True).wait(timedelta(seconds=30))
        assert_same_bits(y, torch.full((50,), float(dist.get_world_size())))
        dist.barrier()  # holds the host


def two_groups() -> None:
    """Their kernels may need to run at the same time."""
    dev = device()
    groups = [dist.new_group(), dist.new_group()]
    with dev.active():
        tensors = [torch.full((2000,), 1.0 + i) for i in range(2)]
        works = [
            dist.all_reduce(x, group=g, async_op=True) for x, g in zip(tensors, groups, strict=True)
        ]
        for work in works:
            work.wait()
        dev.synchronise()
    for i, x in enumerate(tensors):
        assert_same_bits(x, torch.full((2000,), (1.0 + i) * dist.get_world_size()))
    for group in groups:
        dist.destroy_process_group(group)


def test_streams(pool: Pools) -> None:
    for seed in range(4):
        pool(2).run(produce_reduce_consume, seed)
    pool(2).run(drop_works)
    pool(2).run(futures_and_completion)
    pool(2).run(two_groups)


def capture_and_replay() -> None:
    dev, n = device(), dist.get_world_size()
    with dev.active():
        x, y, whole = torch.zeros(700), torch.zeros(10), torch.zeros(n * 10)
        dist.barrier()
        # The last operation before the capture was in another stream: the graph must not wait for it.
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        dist.all_reduce(torch.ones(3), async_op=True)  # dropped: the group keeps its tensor
        with dev.capture() as graph:
            dist.all_reduce(x)
            work = dist.all_gather_into_tensor(whole, y, async_op=True)
            dist.all_reduce(y)  # behind the gather, which is in another stream
            work.wait()
        for step in range(3):
            dev.call(lambda step=step: x.fill_(step + 1.0))
            dev.call(lambda step=step: y.fill_(10.0 * step + dist.get_rank()))
            dev.replay(graph[0])
            dist.all_reduce(torch.ones(900))  # not in the graph
            dev.synchronise()
            assert_same_bits(x, torch.full((700,), (step + 1.0) * n))
            expected = torch.arange(n).repeat_interleave(10) + 10.0 * step
            assert_same_bits(whole, expected)
            assert_same_bits(y, torch.full((10,), n * 10.0 * step + n * (n - 1) / 2))
        group = dist.new_group()
        with pytest.raises(ValueError, match="call one before the capture"), dev.capture():
            dist.all_reduce(x, group=group)


def test_graphs(pool: Pools) -> None:
    pool(2).run(capture_and_replay)


def messages() -> None:
    dev, rank, n = device(), dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % n, (rank - 1) % n
    with dev.active():
        outs = [torch.empty(k) for k in (1, 3000)]
        works = []
        for k, out in zip((1, 3000), outs, strict=True):
            works.append(dist.isend(torch.full((k,), rank + 0.5 * k), to, tag=k))
            works.append(dist.irecv(out, source, tag=k))
        for work in works:
            work.wait()
        strided = torch.zeros(40)
        ops = [
            dist.P2POp(dist.isend, torch.full((20,), 1.0 + rank), to),
            dist.P2POp(dist.irecv, strided[::2], source),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dev.synchronise()
        for k, out in zip((1, 3000), outs, strict=True):
            assert_same_bits(out, torch.full((k,), source + 0.5 * k))
        assert_same_bits(strided[::2], torch.full((20,), 1.0 + source))
        assert not strided[1::2].any()
        with pytest.raises(ValueError, match="name src"):
            dist.recv(outs[0])


def test_messages(pool: Pools) -> None:
    pool(2).run(messages)
    pool(3).run(messages)


def on_streams(group: dist.ProcessGroup, numel: int) -> list[Tensor]:
    rank, n = group.rank(), group.size()
    x = torch.full((numel,), rank + 1.0)
    dist.all_reduce(x, group=group)
    whole = torch.empty(n * numel)
    dist.all_gather_into_tensor(
        whole, torch.full((numel,), float(rank)), group=group, async_op=True
    )
    y = torch.full((numel,), float(rank))
    dist.broadcast(y, group_src=1, group=group)
    return [x, whole, y]


def test_ranks_are_threads_of_one_process() -> None:
    devices = [SimulatedDevice(seed=r) for r in range(3)]

    @contextlib.contextmanager
    def scope(rank: int) -> Iterator[None]:
        with devices[rank].active():
            yield
            devices[rank].synchronise()

    for x, whole, y in run_streams(on_streams, 3, 2003, scope=scope):
        assert_same_bits(x, torch.full((2003,), 6.0))
        assert_same_bits(whole, torch.arange(3.0).repeat_interleave(2003))
        assert_same_bits(y, torch.ones(2003))


# --- failures -------------------------------------------------------------------------------------


def raised(call: Callable[[], Any]) -> str:
    """What the device's operations raise, now or when the host looks."""
    texts = []
    for step in (call, device().synchronise, dist.barrier):
        try:
            with device().active():
                step()
        except (ValueError, RuntimeError) as error:
            texts.append(str(error))
    return "\n".join(texts)


def call_differently(case: str) -> str:
    rank = dist.get_rank()
    with device().active():
        dist.barrier()

    def call() -> None:
        if case == "op":
            op = dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX
            dist.all_reduce(torch.ones(5000), op)
        elif case == "size":
            dist.all_reduce(torch.ones(5000 + rank))
        elif case == "collective":
            x = torch.ones(4000)
            dist.broadcast(x, 0) if rank else dist.all_reduce(x)
        elif case == "splits":
            sizes = [3 + rank, 3 + rank]
            dist.all_to_all_single(
                torch.empty(6 + 2 * rank), torch.ones(6 + 2 * rank), sizes, sizes
            )
        elif case == "message":
            x = torch.ones(4 + rank)
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        elif case == "refused" and rank == 0:
            dist.all_reduce(torch.ones(3, dtype=torch.float32), dist.ReduceOp.BAND)
        else:
            dist.all_reduce(torch.ones(3))

    return raised(call)


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("op", ("all_reduce of float32, MAX", "all_reduce of float32, SUM")),
        ("size", ("with other sizes",)),
        ("collective", ("broadcast of float32, root 0", "all_reduce of float32, SUM")),
        ("splits", ("expects 12", "expects 16")),
        ("message", ("sends 16 bytes", "expects 20")),
        ("refused", ("BAND has no meaning", "a call whose arguments it refused")),
    ],
)
def test_a_mismatch_is_an_error_on_all_ranks(case: str, named: tuple[str, ...]) -> None:
    texts = run_ranks(call_differently, 2, case, timeout=120)
    assert all(texts), texts
    whole = "\n".join(texts)
    assert any(name in whole for name in named), whole


def everybody_is_refused() -> None:
    with device().active():
        for _ in range(2):
            with pytest.raises(ValueError, match="BAND"):
                dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
        x = torch.ones(3)
        dist.all_reduce(x)
        device().synchronise()
    assert_same_bits(x, torch.full((3,), float(dist.get_world_size())))


def test_a_refusal_of_all_does_no_harm(pool: Pools) -> None:
    pool(2).run(everybody_is_refused)


def wait_for_nobody() -> str:
    """Rank 1 comes too late: the deadline of rank 0's kernel ends it, and rank 1 hears of it."""
    with device().active():
        dist.barrier()
    if dist.get_rank() == 0:
        return raised(lambda: dist.all_reduce(torch.ones(5000)))
    time.sleep(4)
    return raised(lambda: dist.all_reduce(torch.ones(5000)))


def test_a_deadline_is_an_error_that_names_the_rank() -> None:
    options = pycoll.Options(timeout=timedelta(seconds=3))
    texts = run_ranks(wait_for_nobody, 2, timeout=120, pg_options=options)
    assert "rank 1 did not come within 3000 ms" in texts[0], texts
    assert "rank 0 gave up" in texts[1], texts


# --- symmetric tensors ----------------------------------------------------------------------------


def symmetric(numel: int, dtype: torch.dtype) -> Tensor:
    """As `pycoll.symmetric_empty` makes it on a GPU."""
    import torch.distributed._symmetric_memory as symm_mem

    tensor = symm_mem.empty(numel, dtype=dtype, device="cpu")
    pycoll.register_symmetric(tensor)
    return tensor


def nothing_is_copied(dtype: torch.dtype, numel: int) -> list[str]:
    n, rank = dist.get_world_size(), dist.get_rank()
    with device().active():
        big = symmetric(n * numel + 5, dtype)
    # Parts of it, the second not aligned.
    x, whole = big[3 : 3 + numel], big[: n * numel]

    def all_reduce() -> list[Tensor]:
        x.copy_(data(numel, dtype))
        op = dist.ReduceOp.SUM if dtype.is_complex else dist.ReduceOp.PRODUCT
        dist.all_reduce(x, op)
        return [x]

    def premultiplied() -> list[Tensor]:
        x.copy_(data(numel, dtype))
        factor = dist._make_nccl_premul_sum(0.5 + rank)  # type: ignore[attr-defined]
        dist.all_reduce(x, factor)
        return [x]

    def reduce_scatter() -> list[Tensor]:
        whole.copy_(data(n * numel, dtype))
        out = torch.empty(numel, dtype=dtype)
        dist.reduce_scatter_tensor(out, whole, dist.ReduceOp.AVG)
        own = whole[rank * numel : (rank + 1) * numel]
        dist.reduce_scatter_tensor(own, whole)  # in place
        return [out, own]

    def all_gather() -> list[Tensor]:
        dist.all_gather_into_tensor(whole, data(numel, dtype))
        return [whole]

    def all_gather_in_place() -> list[Tensor]:
        own = whole[rank * numel : (rank + 1) * numel]
        own.copy_(data(numel, dtype))
        dist.all_gather_into_tensor(whole, own)
        return [whole]

    def broadcast() -> list[Tensor]:
        x.copy_(data(numel, dtype))
        dist.broadcast(x, n - 1)
        return [x]

    calls = [all_reduce, reduce_scatter, all_gather, all_gather_in_place, broadcast]
    if dtype.is_floating_point:
        calls.append(premultiplied)
    for call in calls:
        on_both(call)
    on_device = [event for event in pycoll.events() if event["memory_path"] == "device"]
    return [event["algorithm"] for event in on_device][-len(calls) - 1 :]


@pytest.mark.parametrize("world_size", [2, 3])
def test_symmetric_tensors_are_not_staged(pool: Pools, world_size: int) -> None:
    sizes = (
        (torch.float32, 1003),
        (torch.bfloat16, 3001),
        (torch.int64, 2003),
        (torch.complex64, 999),
    )
    for dtype, numel in sizes:
        for taken in pool(world_size).run(nothing_is_copied, dtype, numel):
            assert set(taken) == {"mapped"}, taken


def symmetric_elsewhere(on_one: bool) -> str:
    rank = dist.get_rank()
    with device().active():
        shared = symmetric(5004, torch.float32)
    other = torch.ones(5000) if on_one else shared[4:]
    return raised(lambda: dist.all_reduce(shared[:5000] if rank else other))


def late_readers() -> None:
    """A rank writes to its tensor behind the operation, while others may still be reading it."""
    dev, n, rank = device(), dist.get_world_size(), dist.get_rank()
    with dev.active():
        whole = symmetric(n * 2000, torch.float32)
        outs = [torch.empty(2000) for _ in range(4)]
        for step, out in enumerate(outs):
            dev.call(lambda step=step: whole.fill_(10.0 * step + rank))
            dist.reduce_scatter_tensor(out, whole)
        dev.synchronise()
    for step, out in enumerate(outs):
        assert_same_bits(out, torch.full((2000,), n * 10.0 * step + n * (n - 1) / 2))


def test_symmetric_tensors_are_left_alone_until_all_have_read(pool: Pools) -> None:
    pool(3).run(late_readers)


@pytest.mark.parametrize("on_one", [True, False])
def test_symmetric_tensors_at_different_places_are_a_mismatch(on_one: bool) -> None:
    texts = run_ranks(symmetric_elsewhere, 2, on_one, timeout=120)
    assert all(texts), texts
    assert "symmetric tensors at another place" in "".join(texts)


# --- selection ------------------------------------------------------------------------------------


def algorithms_taken() -> list[str]:
    with device().active():
        for numel in (10, 400, 1500):
            dist.all_reduce(torch.ones(numel))
        device().synchronise()
    return [event["algorithm"] for event in pycoll.events() if event["memory_path"] == "device"][
        -3:
    ]


@pytest.mark.parametrize("algorithm", ["ring", "ring_ll128"])
def test_an_algorithm_is_taken_by_name(algorithm: str) -> None:
    env = {"PYCOLL_CUDA_ALGORITHM": algorithm}
    assert run_ranks(algorithms_taken, 2, env=env) == [[algorithm] * 3] * 2
    run_ranks(reductions_along_a_ring, 3, env=env)


def reductions_along_a_ring() -> None:
    """Integers, whose sums do not depend on the order."""
    reductions(torch.int32, 1009)
    moves(torch.int16, 61)


def test_a_measured_table_goes_first(tmp_path: Path) -> None:
    row = {
        "architecture": 0,
        "world_size": None,
        "collective": "all_reduce",
        "algorithm": "two_shot",
        "num_blocks": 1,
        "most_nbytes": 100,
    }
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"format": 1, "rows": [row]}))
    env = {"PYCOLL_CUDA_TUNING": str(table)}
    assert run_ranks(algorithms_taken, 2, env=env)[0] == ["two_shot", "one_shot", "two_shot"]
    table.write_text(json.dumps({"format": 1, "rows": [{**row, "algorithm": "ring"}]}))
    for text in run_ranks(failure_of_first, 2, env=env):
        assert "gives up the fixed order" in text
    table.write_text("{}")
    for text in run_ranks(failure_of_first, 2, env=env):
        assert "is no tuning table" in text


def failure_of_first() -> str:
    return raised(lambda: dist.all_reduce(torch.ones(3)))
