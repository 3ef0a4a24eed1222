"""How fast Triton kernels are on one GPU, beside what the hardware allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from measure import MIB, copy_rate, floor_bytes, rates_of, tensors_of_bucket
from torch import Tensor
from triton_trials import Place
from triton_values import groups_of, launches_of, load, streams_of

from pycoll.triton_kernels import triton_version
from pycoll.triton_kernels.launching import LaunchConfig

RANKS = (2, 4)
SIZES = (1024, 64 * MIB)
TIMEOUT_S = 5.0
ROUNDS = 5


def rates() -> dict[str, Any]:
    version = triton_version()
    if version is None:
        return {"status": "skipped", "reason": "Triton is not installed"}
    rate = copy_rate()
    found, wrong = _buckets(rate)
    rows, wrong_sums = _all_reduce(rate)
    return {
        "triton": version,
        "copy_gb_per_s": rate / 1e9,
        **found,
        "goal_of_copy": 0.9,
        "all_reduce": rows,
        "goal_of_floor": 0.85,
        "wrong": wrong + wrong_sums,
    }


def _buckets(rate: float) -> tuple[dict[str, Any], list[str]]:
    from pycoll.triton_kernels.bucket import BucketTable, flatten_into, unflatten_into

    found: dict[str, Any] = {}
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        tensors = tensors_of_bucket(dtype)
        whole = torch.cat(tensors)
        flat, table = torch.empty_like(whole), BucketTable(tensors)
        flatten_into(flat, table)
        if not torch.equal(flat, whole):
            wrong.append(f"flatten of {dtype}")
        nbytes = 2 * flat.nbytes
        ways: dict[str, tuple[int, Callable[[], Any]]] = {
            "flatten": (nbytes, lambda f=flat, t=table: flatten_into(f, t)),
            "unflatten": (nbytes, lambda f=flat, t=table: unflatten_into(f, t)),
            "flatten_scaled": (nbytes, lambda f=flat, t=table: flatten_into(f, t, scale=0.5)),
        }
        found[str(dtype).removeprefix("torch.")] = rates_of(ways, rate)
    return found, wrong


def _all_reduce(rate: float) -> tuple[list[dict[str, Any]], list[str]]:
    rows, wrong = [], []
    for n in RANKS:
        for nbytes in SIZES:
            seconds, is_right = _timed(n, nbytes, repetitions=100 if nbytes < MIB else 5)
            floor = floor_bytes(n, nbytes) / rate
            rows.append(
                {
                    "ranks": n,
                    "nbytes": nbytes,
                    "microseconds": seconds * 1e6,
                    "floor_microseconds": floor * 1e6,
                    "of_floor": floor / seconds,
                }
            )
            if not is_right:
                wrong.append(f"all_reduce of {nbytes} bytes by {n} ranks")
    return rows, wrong


def _timed(n: int, nbytes: int, repetitions: int) -> tuple[float, bool]:
    """Seconds of one operation, of several in a row; and whether the sum was right. Each rank's operations are a graph,
    so that no time of the host is in it."""
    from pycoll.triton_kernels.collectives import all_reduce

    groups = _groups(n)
    streams = streams_of(n)
    inputs = [torch.full((nbytes // 4,), 1.0 + rank, device="cuda") for rank in range(n)]
    outputs = [torch.zeros_like(x) for x in inputs]
    calls = list(zip(groups, inputs, outputs, strict=True))
    load([launches_of(all_reduce, *call) for call in calls])
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in range(n)]
    for graph, stream, call in zip(graphs, streams, calls, strict=True):
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repetitions):
                all_reduce(*call)
    seconds = _replay(graphs, streams) / repetitions
    for group in groups:
        group.check()
    return seconds, _are_sums(outputs, n)


def _groups(n: int) -> list[Any]:
    """With as many blocks as find room at once, whatever registers they need."""
    num_blocks = torch.cuda.get_device_properties(0).multi_processor_count // n
    config = LaunchConfig(num_blocks=min(128, num_blocks))
    place = Place("cuda", config, slot_bytes=64 << 10, mailbox_bytes=256 << 10)
    return groups_of(n, place, timeout_s=TIMEOUT_S)


def _replay(graphs: Sequence[Any], streams: Sequence[Any]) -> float:
    times = []
    for _ in range(ROUNDS + 1):  # the first one does not count
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def _are_sums(outputs: Sequence[Tensor], n: int) -> bool:
    return all(bool((y == n * (n + 1) / 2).all()) for y in outputs)
