"""Every Triton kernel on one GPU, to the bit against the CPU: ranks as processes and as streams of one process.

Without a GPU Triton's interpreter runs a small case of each, which shows that this script works.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from triton_compiler import Specification, specification
from triton_interpreter import make_interpreter_fast
from triton_ranks import error_of, late_rank, mismatch, run_cases
from triton_trials import (
    INTERPRETER,
    KERNELS,
    Case,
    Place,
    moved_buckets,
    quantised_blocks,
    scales_and_amax,
    trial_of,
)
from where import SIMULATES

from pycoll.testing import RankPool
from pycoll.triton_kernels import triton_version
from pycoll.triton_kernels.launching import Launch, LaunchConfig, compiled, start, started_by

TIMEOUT_S = 10.0
MOST_COMPLAINTS = 5
MOST_COMPILERS = 16  # each has a context on the GPU

# The first two for each kernel, the others in turn.
REDUCTIONS = (
    (torch.float32, "sum"),
    (torch.bfloat16, "sum"),
    (torch.float16, "avg"),
    (torch.float8_e4m3fn, "sum"),
    (torch.float8_e5m2, "max"),
    (torch.float64, "product"),
    (torch.int64, "avg"),
    (torch.int32, "bor"),
    (torch.int16, "min"),
    (torch.uint8, "bxor"),
    (torch.int8, "band"),
    (torch.bool, "sum"),
    (torch.complex64, "product"),
    (torch.bfloat16, "premul_sum"),
)
MOVED = (torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex64)
BUCKETS = (
    *((torch.float32, torch.float32), (torch.float32, torch.bfloat16)),
    *((torch.bfloat16, torch.float32), (torch.float16, torch.float8_e4m3fn)),
    *((torch.float8_e5m2, torch.float32), (torch.int64, torch.int64)),
    *((torch.bool, torch.bool), (torch.complex64, torch.complex64)),
)
QUANTISED = (
    *((torch.float32, torch.float8_e4m3fn), (torch.bfloat16, torch.float8_e5m2)),
    *((torch.float16, torch.int8), (torch.bfloat16, torch.float8_e4m3fn)),
)
# Elements and block: one launch, two, and blocks whose elements no vector may hold together.
QUANTISED_SIZES = ((1 << 16, 128), (65537, 128), (331, 17), (100, 1000))

if SIMULATES:
    PLACE = INTERPRETER
    RANKS_AS_PROCESSES, RANKS_AS_STREAMS = 2, (1,)
    NUMELS = (37,)
    BUCKET_NUMELS = (7, 1, 41, 0, 10, 5)
    BUCKETS, QUANTISED, QUANTISED_SIZES = BUCKETS[1:2], QUANTISED[:3], ((131, 17),)
    DEADLINE_S, PROCESSES_S = 0.02, 120.0
else:
    PLACE = Place("cuda", LaunchConfig(num_blocks=8, num_warps=4), 16 << 10, 1 << 20)
    RANKS_AS_PROCESSES, RANKS_AS_STREAMS = 3, (2, 3, 4, 8)
    NUMELS = (1, 1009, 1 << 16)
    BUCKET_NUMELS = (7, 1, 30011, 0, 100, 100003, 5)
    DEADLINE_S = 1.0  # so late may a rank come that shares the GPU
    PROCESSES_S = 30.0


def cases() -> list[Case]:
    """Each dtype and each op with some kernel; each kernel aligned, and unaligned in place with uneven chunks."""
    found = []
    for k, kernel in enumerate(KERNELS):
        uneven = kernel in ("reduce_scatter", "all_gather")
        pairs = [*REDUCTIONS[:2], *REDUCTIONS[2 + k :: len(KERNELS) - 1]]
        if kernel == "all_gather":
            pairs = [(dtype, "sum") for dtype in MOVED]
        for dtype, op in pairs[: 1 if SIMULATES else None]:
            found += [Case(kernel, dtype, op, numel, 0, False, False) for numel in NUMELS]
        found += [Case(kernel, *pairs[1], NUMELS[len(NUMELS) // 2], 1, True, uneven)]
        found += [Case(kernel, *pairs[-1], NUMELS[-1], 0, True, uneven)]
    return found


# ---- compiled first, on all cores: a part has little time

ON_CPU = replace(PLACE, device="cpu")


def collective_launches() -> Iterator[Launch]:
    """As all ranks of small groups make them. What is compiled depends on how chunks are aligned, not on sizes."""
    for world_size in (2, 4):
        groups = groups_of(world_size, ON_CPU, [0] * world_size)
        for case in cases():
            for rank in range(world_size):
                yield from launches_of(trial_of(case, rank, world_size, 0).start, groups[rank])


def launches_of(function: Callable[..., object], *arguments: Any) -> list[Launch]:
    """What `function` would launch."""
    launches: list[Launch] = []
    with started_by(launches.append):
        function(*arguments)
    return launches


def all_launches() -> list[Launch]:
    """One of each that the compiler tells from the others. Tensors lie on the CPU."""
    found: dict[Specification, Launch] = {}
    for launch in (
        *collective_launches(),
        *launches_of(moved_buckets, BUCKETS, ON_CPU),
        *launches_of(scales_and_amax, ON_CPU),
        *launches_of(quantised_blocks, QUANTISED, QUANTISED_SIZES, ON_CPU),
    ):
        found.setdefault(specification(launch), launch)
    return list(found.values())


def compile_all() -> list[str]:
    """Into Triton's cache on disk, from which every rank takes them."""
    if SIMULATES:
        return []
    num_processes = min(len(os.sched_getaffinity(0)), MOST_COMPILERS)
    shares = [(index, num_processes) for index in range(num_processes)]
    # This process has not touched the GPU; a child of it may.
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        return [error for errors in pool.starmap(_compile_share, shares, 1) for error in errors]


def _compile_share(index: int, num_shares: int) -> list[str]:
    torch.set_num_threads(1)
    errors = []
    for launch in all_launches()[index::num_shares]:
        try:
            compiled(launch)
        except Exception as error:
            errors.append(f"{launch.kernel.fn.__name__}: {error}")
    return errors


# ---- ranks as processes


def processes() -> list[str]:
    complaints = []
    with RankPool(RANKS_AS_PROCESSES, timeout=PROCESSES_S) as pool:
        for rank, failures in enumerate(pool.run(run_cases, cases(), TIMEOUT_S, PLACE)):
            complaints += [f"rank {rank}: {case}: {what}" for case, what in failures.items()]
        for algorithm in ("one_shot", "ring"):
            found = pool.run(late_rank, algorithm, DEADLINE_S, PLACE)
            for rank, (text, record) in enumerate(found):
                if rank != 1 and (f"rank {rank} waited in vain" not in text or record[3] != 1):
                    complaints.append(f"rank {rank} does not name rank 1, which is late: {text!r}")
        for rank, (text, is_untouched) in enumerate(
            pool.run(mismatch, "two_shot", TIMEOUT_S, PLACE)
        ):
            if "does not call what rank" not in text or not is_untouched:
                complaints.append(f"rank {rank} does not see that sizes differ: {text!r}")
    return complaints


# ---- ranks as streams


def groups_of(
    world_size: int,
    place: Place,
    addresses: list[int] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Every rank's group, over memory of this process."""
    from pycoll.triton_kernels.group import LINE_BYTES, Layout, TritonGroup

    layout = Layout(world_size, place.config, place.slot_bytes, place.mailbox_bytes)
    device = torch.device(place.device)
    memory: list[torch.Tensor] = []
    if addresses is None:
        memory = [
            torch.zeros(layout.nbytes() + LINE_BYTES, dtype=torch.uint8, device=device)
            for _ in range(world_size)
        ]
        addresses = [-(-tensor.data_ptr() // LINE_BYTES) * LINE_BYTES for tensor in memory]
    return [
        TritonGroup(rank, layout, addresses, device, timeout_s=timeout_s, keep=memory)
        for rank in range(world_size)
    ]


def load(launches: list[list[Launch]]) -> None:
    """A kernel that waits may keep another one from being loaded, so ranks of one process load all of theirs first."""
    for of_rank in launches:
        for launch in of_rank:
            _ = compiled(launch).run


def start_on(streams: list[Any], launches: list[list[Launch]]) -> None:
    """Of each rank into its stream, until all have ended."""
    if not SIMULATES:
        load(launches)
    PLACE.finish()
    for stream, of_rank in zip(streams, launches, strict=True):
        with torch.cuda.stream(stream):
            for launch in of_rank:
                start(launch)
    PLACE.finish()


def streams_of(world_size: int) -> list[Any]:
    return [None if SIMULATES else torch.cuda.Stream() for _ in range(world_size)]


def streams() -> list[str]:
    complaints = []
    for n in RANKS_AS_STREAMS:
        groups, own = groups_of(n, PLACE), streams_of(n)
        for salt, case in enumerate(cases()):
            trials = [trial_of(case, rank, n, salt, PLACE.device) for rank in range(n)]
            start_on(own, [launches_of(t.start, g) for t, g in zip(trials, groups, strict=True)])
            for rank, trial in enumerate(trials):
                groups[rank].check()
                try:
                    trial.check()
                except AssertionError as error:
                    complaints.append(f"{case}, rank {rank} of {n}: {error}")
    return complaints


def deadline() -> list[str]:
    """Rank 1 of 2 does not come."""
    group, *_ = groups_of(2, PLACE, timeout_s=DEADLINE_S)
    case = Case("two_shot", torch.float32, "sum", 1009, 0, False, False)
    trial = trial_of(case, 0, 2, 0, PLACE.device)
    begin = time.monotonic()
    start_on(streams_of(1), [launches_of(trial.start, group)])
    text, seconds = error_of(group), time.monotonic() - begin
    if "rank 0 waited in vain for rank 1" not in text:
        return [f"a deadline of {DEADLINE_S} s brought, after {seconds:.2f} s, {text!r}"]
    return []


# ---- kernels of one rank


def buckets() -> list[str]:
    complaints = moved_buckets(BUCKETS, PLACE, BUCKET_NUMELS)
    largest, with_nan, is_scaled = scales_and_amax(PLACE)
    if largest != 700.0 or with_nan == with_nan or not is_scaled:
        complaints.append(f"amax is {largest} and {with_nan}; device_scale multiplies: {is_scaled}")
    return complaints


def quantisation() -> list[str]:
    return quantised_blocks(QUANTISED, QUANTISED_SIZES, PLACE)


# What they return is wrong; what they raise is, too.
CHECKS: dict[str, Callable[[], list[str]]] = {
    "compile": compile_all,
    "processes": processes,
    "buckets": buckets,
    "quantisation": quantisation,
    "streams": streams,
    "deadline": deadline,
}


def values() -> dict[str, Any]:
    version = triton_version()
    if version is None:
        return {"status": "skipped", "reason": "Triton is not installed"}
    if SIMULATES:
        make_interpreter_fast()
    seconds, wrong = {}, []
    for name, check in CHECKS.items():
        begin = time.monotonic()
        try:
            complaints = check()
        except Exception as error:
            complaints = [f"{type(error).__name__}: {str(error)[-1000:]}"]
        seconds[name] = round(time.monotonic() - begin, 2)
        print(f"{name}: {seconds[name]} s", flush=True)  # seen where a part takes too long
        wrong += [f"{name}: {text}" for text in complaints[:MOST_COMPLAINTS]]
    return {"triton": version, "seconds_of": seconds, "wrong": wrong}
