"""Rates and latencies on one GPU, beside what the hardware allows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from where import Rank

from pycoll import ops
from pycoll.testing import run_streams

TIMEOUT = timedelta(seconds=20)
GIB, MIB = 1 << 30, 1 << 20
# About the gradients of a transformer layer, several times, with odd sizes between.
NUMELS = (4096 * 4096, 4096, 4096 * 11008, 4097, 11008 * 4096, 31, 1024 * 4096)
COPIES = 2


def seconds_of(launch: Callable[[], Any], repetitions: int = 20) -> float:
    """The median of one launch, by events of the device."""
    for _ in range(3):
        launch()
    times = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def copy_rate(nbytes: int = GIB) -> float:
    """Bytes read and written a second by a copy of device memory."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * nbytes / seconds_of(lambda: target.copy_(source))


def rates_of(ways: dict[str, tuple[int, Callable[[], Any]]], copy_rate: float) -> dict[str, Any]:
    """Of calls, each with the bytes that it must read and write."""
    found = {}
    for name, (nbytes, call) in ways.items():
        reached = nbytes / seconds_of(call)
        found[name] = {"gb_per_s": reached / 1e9, "of_copy": reached / copy_rate}
    return found


def tensors_of_bucket(dtype: torch.dtype) -> list[Tensor]:
    return _tensors(list(NUMELS) * COPIES, dtype)


def _tensors(numels: list[int], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(numel, device="cuda").to(dtype) for numel in numels]


def _bucket_rates(tensors: list[Tensor], rate: float) -> dict[str, Any]:
    """Of pycoll.ops as users call them, beside torch's way."""
    flat = torch.empty_like(torch.cat(tensors))
    views = list(flat.split([tensor.numel() for tensor in tensors]))
    halves = flat.to(torch.bfloat16)
    wide, narrow = 2 * flat.nbytes, flat.nbytes + halves.nbytes
    return rates_of(
        {
            "flatten": (wide, lambda: ops.flatten(tensors)),
            "flatten_into": (wide, lambda: ops.flatten_into(flat, tensors)),
            "flatten_into_scaled": (wide, lambda: ops.flatten_into(flat, tensors, scale=0.5)),
            "flatten_into_bfloat16": (narrow, lambda: ops.flatten_into(halves, tensors)),
            "unflatten": (wide, lambda: ops.unflatten(flat, [tensor.shape for tensor in tensors])),
            "unflatten_into": (wide, lambda: ops.unflatten_into(flat, tensors)),
            "foreach_copy": (wide, lambda: torch._foreach_copy_(views, tensors)),
        },
        rate,
    )


def buckets() -> dict[str, Any]:
    rate = copy_rate()
    found: dict[str, Any] = {"copy_gb_per_s": rate / 1e9}
    wrong = []
    cases = [(dtype, list(NUMELS) * COPIES) for dtype in (torch.float32, torch.bfloat16)]
    # Where the host's part counts: the table of thousands of tensors.
    cases.append((torch.float32, [4096 + index % 61 for index in range(5000)]))
    for dtype, numels in cases:
        tensors = _tensors(numels, dtype)
        name = f"{len(numels)}_of_{str(dtype).removeprefix('torch.')}"
        if not torch.equal(ops.flatten(tensors), torch.cat(tensors)):
            wrong.append(f"flatten of {name}")
        found[name] = _bucket_rates(tensors, rate)
    x = torch.randn(NUMELS[0], device="cuda")
    codes, scales = ops.quantise_blocks(x)
    nbytes = x.nbytes + codes.nbytes + scales.nbytes
    found |= rates_of(
        {
            "quantise_blocks": (nbytes, lambda: ops.quantise_blocks(x)),
            "dequantise_blocks": (nbytes, lambda: ops.dequantise_blocks(codes, scales)),
        },
        rate,
    )
    return {**found, "goal_of_copy": 0.9, "wrong": wrong}


# --- ranks as streams -----------------------------------------------------------------------------


def floor_bytes(n: int, nbytes: int) -> int:
    """Read and written on the one device: every rank's input is read and every rank's output written; and what goes
    between ranks, (n - 1)/n of each on the way in and on the way out, is written to and read from slots."""
    own = 2 * n * nbytes
    between = 2 * 2 * (n - 1) * nbytes
    return own + between


def _timed(group: Any, meeting: threading.Barrier, tensor: Tensor, repetitions: int) -> float:
    """Seconds of one operation, of several in a row."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        meeting.wait()
        begin = time.perf_counter()
        for _ in range(repetitions):
            dist.all_reduce(tensor, group=group)
        torch.cuda.current_stream().synchronize()
        meeting.wait()
        times.append((time.perf_counter() - begin) / repetitions)
    return median(times)


def _all_reduce_on_stream(
    group: Any, meeting: threading.Barrier, sizes: list[int], repetitions: int
) -> list[float]:
    return [
        _timed(group, meeting, torch.ones(nbytes // 4, device="cuda"), repetitions)
        for nbytes in sizes
    ]


def _by_ranks(sizes: list[int], repetitions: int) -> dict[int, list[float]]:
    found = {}
    for n in (2, 4, 8):
        ranks = [Rank(r) for r in range(n)]
        arguments = (threading.Barrier(n, timeout=20), sizes, repetitions)
        times = run_streams(
            _all_reduce_on_stream,
            n,
            *arguments,
            scope=lambda r, ranks=ranks: ranks[r].scope(),
            timeout=TIMEOUT,
        )
        found[n] = [max(of_size) for of_size in zip(*times, strict=True)]
    return found


def all_reduce() -> dict[str, Any]:
    sizes = [MIB, 16 * MIB, 128 * MIB]
    rate = copy_rate()
    rows = [
        {
            "ranks": n,
            "nbytes": nbytes,
            "microseconds": seconds * 1e6,
            "of_floor": floor_bytes(n, nbytes) / rate / seconds,
        }
        for n, times in _by_ranks(sizes, 5).items()
        for nbytes, seconds in zip(sizes, times, strict=True)
    ]
    return {"copy_gb_per_s": rate / 1e9, "rows": rows, "goal_of_floor": 0.85}


def latency() -> dict[str, Any]:
    sizes = [4, 1024, 16 * 1024, 256 * 1024]
    rows = [
        {"ranks": n, "nbytes": nbytes, "microseconds": seconds * 1e6}
        for n, times in _by_ranks(sizes, 100).items()
        for nbytes, seconds in zip(sizes, times, strict=True)
    ]
    return {"rows": rows}
