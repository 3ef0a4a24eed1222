"""Every kernel and collective with several ranks on one GPU, against sums that are exact in any order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from where import DEVICE, SIMULATES, Rank

import pycoll
from pycoll.testing import run_ranks, run_streams

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SMALL_NUMELS, NUMELS = (1, 1009), (1, 17, 1009, 65537, 1 << 20)
ALGORITHMS = ("auto", "one_shot", "two_shot", "ring", "ring_ll128")
TIMEOUT = timedelta(seconds=15)
MOST_COMPLAINTS = 10

Check = tuple[str, Tensor, Tensor]


def data(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """0 or 1, by rank and position: sums of 8 ranks are exact in every dtype."""
    bits = (torch.arange(numel) * 7 + rank * 13) % 11 % 2
    return bits.to(dtype)


def summed(n: int, numel: int, dtype: torch.dtype) -> Tensor:
    total = sum(data(r, numel, torch.int64) for r in range(n))
    assert isinstance(total, Tensor)
    return (total > 0) if dtype == torch.bool else total.to(dtype)


def reductions(group: Any, dtype: torch.dtype, numel: int) -> Iterator[Check]:
    rank, n = group.rank(), group.size()
    x = data(rank, numel, dtype).to(DEVICE)
    dist.all_reduce(x, group=group)
    yield "all_reduce", x, summed(n, numel, dtype)
    y = data(rank, numel, dtype).to(DEVICE)
    dist.all_reduce(y, group=group, async_op=True).wait()
    yield "all_reduce, asynchronous", y, summed(n, numel, dtype)
    whole = torch.cat([data(rank + r, numel, dtype) for r in range(n)]).to(DEVICE)
    out = torch.empty(numel, dtype=dtype, device=DEVICE)
    dist.reduce_scatter_tensor(out, whole, group=group)
    total = sum(data(r + rank, numel, torch.int64) for r in range(n))
    assert isinstance(total, Tensor)
    yield "reduce_scatter", out, (total > 0) if dtype == torch.bool else total.to(dtype)


def moves(group: Any, dtype: torch.dtype, numel: int) -> Iterator[Check]:
    rank, n = group.rank(), group.size()
    whole = torch.empty(n * numel, dtype=dtype, device=DEVICE)
    dist.all_gather_into_tensor(whole, data(rank, numel, dtype).to(DEVICE), group=group)
    yield "all_gather", whole, torch.cat([data(r, numel, dtype) for r in range(n)])
    x = data(rank, numel, dtype).to(DEVICE)
    dist.broadcast(x, group_src=n - 1, group=group)
    yield "broadcast", x, data(n - 1, numel, dtype)
    out = torch.empty(n * numel, dtype=dtype, device=DEVICE)
    sent = torch.cat([data(rank + 3 * r, numel, dtype) for r in range(n)]).to(DEVICE)
    dist.all_to_all_single(out, sent, group=group)
    yield "all_to_all", out, torch.cat([data(r + 3 * rank, numel, dtype) for r in range(n)])
    received = torch.empty(numel, dtype=dtype, device=DEVICE)
    works = [
        dist.isend(data(rank, numel, dtype).to(DEVICE), group_dst=(rank + 1) % n, group=group),
        dist.irecv(received, group_src=(rank - 1) % n, group=group),
    ]
    for work in works:
        if work is not None:
            work.wait()
    yield "send and receive", received, data((rank - 1) % n, numel, dtype)


def all_checks(group: Any, own: Rank, numels: tuple[int, ...]) -> list[str]:
    """What was wrong."""
    wrong = []
    for dtype in DTYPES:
        for numel in numels:
            for run in (reductions, moves):
                if SIMULATES and dtype not in (torch.float32, torch.bfloat16, torch.int64):
                    continue
                for what, got, want in list(run(group, dtype, numel)):
                    own.finish()
                    if not torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)):
                        wrong.append(f"rank {group.rank()}: {what} of {numel} {dtype}")
    return wrong


def on_stream(group: Any, ranks: list[Rank], numels: tuple[int, ...]) -> list[str]:
    wrong = all_checks(group, ranks[group.rank()], numels)
    group._get_backend(torch.device(DEVICE)).barrier().wait()
    return wrong


def streams(world_size: str, size: str = "") -> dict[str, Any]:
    n = int(world_size)
    numels = SMALL_NUMELS if size or SIMULATES else NUMELS
    algorithms = ("auto", "two_shot") if size or SIMULATES else ALGORITHMS
    wrong: list[str] = []
    for algorithm in algorithms:
        os.environ["PYCOLL_CUDA_ALGORITHM"] = algorithm
        ranks = [Rank(r) for r in range(n)]
        found = run_streams(
            on_stream,
            n,
            ranks,
            numels,
            scope=lambda r, ranks=ranks: ranks[r].scope(),
            timeout=TIMEOUT,
        )
        wrong += [f"{algorithm}: {text}" for texts in found for text in texts]
    return {
        "algorithms": list(algorithms),
        "numels": list(numels),
        "wrong": wrong[:MOST_COMPLAINTS],
    }


def on_process(numels: tuple[int, ...]) -> list[str]:
    own = Rank(dist.get_rank())
    with own.scope():
        wrong = all_checks(dist.group.WORLD, own, numels)
        x = torch.full((4096,), 1.0 + dist.get_rank(), device=DEVICE)
        pycoll.all_reduce(x, wire_dtype=torch.int8, block=128)
        own.finish()
        n = dist.get_world_size()
        if (x.cpu() - n * (n + 1) / 2).abs().max() > 0.02 * n * n:
            wrong.append(f"rank {dist.get_rank()}: all_reduce on a wire of int8")
        dist.barrier()
    return wrong


def processes(world_size: str) -> dict[str, Any]:
    numels = SMALL_NUMELS if SIMULATES else NUMELS
    options = pycoll.Options(timeout=TIMEOUT)
    found = run_ranks(on_process, int(world_size), numels, pg_options=options, timeout=60)
    wrong = [text for texts in found for text in texts]
    return {"numels": list(numels), "wrong": wrong[:MOST_COMPLAINTS]}
