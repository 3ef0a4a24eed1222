"""What ranks that are processes do with Triton kernels: by the interpreter, on pycoll's symmetric memory of the CPU; or
on a GPU that they share."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from triton_interpreter import make_interpreter_fast
from triton_trials import INTERPRETER, KERNELS, Case, Place, trial_of

TIMEOUT_S = 300.0


@functools.cache
def group_of_rank(timeout_s: float = TIMEOUT_S, place: Place = INTERPRETER) -> Any:
    if place.device == "cpu":
        make_interpreter_fast()
    from pycoll.triton_kernels.group import TritonGroup

    return TritonGroup.of_process_group(
        device=place.device,
        config=place.config,
        slot_bytes=place.slot_bytes,
        mailbox_bytes=place.mailbox_bytes,
        timeout_s=timeout_s,
    )


def run_cases(
    cases: Sequence[Case], timeout_s: float = TIMEOUT_S, place: Place = INTERPRETER
) -> dict[str, str]:
    """What went wrong, by case. Ranks come late at random."""
    group, rank, n = group_of_rank(timeout_s, place), dist.get_rank(), dist.get_world_size()
    late = random.Random(rank)
    failures = {}
    for salt, case in enumerate(cases):
        if late.random() < 0.05:
            time.sleep(0.02)
        trial = trial_of(case, rank, n, salt, place.device)
        trial.start(group)
        place.finish()
        group.check()
        try:
            trial.check()
        except AssertionError as error:
            failures[str(case)] = str(error)
    return failures


def start_at(epoch: int) -> None:
    """As if so many operations, modulo 2^32, had been before."""
    group = group_of_rank()
    memory, _ = group._keep
    control, signals, rings, *_ = group.layout.sizes()
    signed = (epoch + 2**31) % 2**32 - 2**31
    dist.barrier()
    group.epochs.fill_(signed)
    memory[:control].view(torch.int32).fill_(signed)
    memory[control : control + signals + rings].view(torch.int64).fill_(signed << 32)
    dist.barrier()


def epochs_wrap_around() -> dict[str, str]:
    failures = {}
    for epoch in (2**32 - 2, 2**31 - 2):
        start_at(epoch)
        cases = [Case(kernel, torch.float32, "sum", 37, 0, False, False) for kernel in KERNELS]
        failures |= {f"{epoch}: {name}": text for name, text in run_cases(cases).items()}
    return failures


def error_of(group: Any) -> str:
    try:
        group.check()
    except dist.DistBackendError as error:
        return str(error)
    return ""


def late_rank(
    algorithm: str, timeout_s: float = 0.01, place: Place = INTERPRETER
) -> tuple[str, list[int]]:
    """Rank 1 does not come; what the others' check says, and the record."""
    group_of_rank.cache_clear()
    group = group_of_rank(timeout_s, place)
    from pycoll.triton_kernels import collectives

    if dist.get_rank() != 1:
        x = torch.ones(40, device=place.device)
        collectives.all_reduce(group, x, algorithm=algorithm)
        # All later kernels return at once.
        collectives.all_reduce(group, x, algorithm=algorithm)
        place.finish()
    return error_of(group), group.record.tolist()


def mismatch(
    algorithm: str, timeout_s: float = 5.0, place: Place = INTERPRETER
) -> tuple[str, bool]:
    """Rank 1 adds one element more: what each rank says, and whether its output is untouched."""
    group_of_rank.cache_clear()
    group = group_of_rank(timeout_s, place)
    from pycoll.triton_kernels import collectives

    x = torch.ones(41 if dist.get_rank() == 1 else 40, device=place.device)
    y = torch.full_like(x, 7.0)
    collectives.all_reduce(group, x, y, algorithm=algorithm)
    place.finish()
    text = error_of(group)
    return text, bool(text) and bool((y == 7.0).all())


def aborted() -> bool:
    """The host gives up: kernels return, and check says so."""
    group_of_rank.cache_clear()
    group = group_of_rank()
    from pycoll.triton_kernels import collectives

    group.abort()
    y = torch.full((40,), 7.0)
    collectives.all_reduce(group, torch.ones(40), y)
    return "aborted" in error_of(group) and bool((y == 7.0).all())


def by_interpreter(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives that calls kernels without ranks."""
    make_interpreter_fast()
    return function(*arguments)
