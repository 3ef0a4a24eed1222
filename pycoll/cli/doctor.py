"""`pycoll doctor`: tries what pycoll needs of a machine, and says what is wrong and what mends it."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pycoll.cli.rows import print_rows

Verdict = Literal["ok", "slow", "fails"]


@dataclass(frozen=True)
class Finding:
    what: str
    verdict: Verdict
    seen: str
    remedy: str = ""


def shared_memory() -> Finding:
    what = "shared memory (memfd, sealed, grown by fallocate)"
    remedy = "free memory, or raise the container's memory limit and ulimit -f"
    try:
        descriptor = os.memfd_create("pycoll-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, 64 << 20)
            with mmap.mmap(descriptor, 64 << 20) as memory:
                memory[(64 << 20) - 1] = 7
        finally:
            os.close(descriptor)
    except OSError as error:
        return Finding(what, "fails", str(error), remedy)
    return Finding(what, "ok", "64 MiB added and touched")


def passing_descriptors() -> Finding:
    what = "passing memory between processes (abstract sockets, SCM_RIGHTS)"
    name = f"\0pycoll-doctor-{os.getpid()}"
    try:
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
            listener.bind(name)
            listener.listen(1)
            caller.connect(name)
            accepted, _ = listener.accept()
            with accepted:
                socket.send_fds(caller, [b"x"], [caller.fileno()])
                _, descriptors, _, _ = socket.recv_fds(accepted, 1, 1)
                for descriptor in descriptors:
                    os.close(descriptor)
                credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError as error:
        return Finding(what, "fails", str(error), "allow local sockets in the sandbox")
    pid = int.from_bytes(credentials[:4], "little")
    if pid != os.getpid() or len(descriptors) != 1:
        return Finding(what, "fails", "the kernel did not pass it", "allow SCM_RIGHTS")
    return Finding(what, "ok", "descriptor and credentials arrived")


def watching_processes() -> Finding:
    what = "watching processes (pidfd)"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        remedy = "Linux 5.3 or later; without it a death is seen late while a forked child lives"
        return Finding(what, "slow", str(error), remedy)
    return Finding(what, "ok", "works")


def sleeping_and_waking() -> Finding:
    """A futex: the call that threads sleep in must exist and return at once for a value that has changed."""
    what = "sleeping and waking (futex)"
    if os.uname().machine not in ("x86_64", "aarch64"):
        return Finding(what, "ok", "not tried on this processor")
    number = 202 if os.uname().machine == "x86_64" else 98
    word = ctypes.c_uint32(1)
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(number, ctypes.byref(word), 0, 0, None, None, 0)
    if result == -1 and ctypes.get_errno() == 11:  # EAGAIN: the word is not 0
        return Finding(what, "ok", "works")
    error = os.strerror(ctypes.get_errno())
    return Finding(what, "fails", error, "allow the futex system call in the sandbox")


def cores() -> Finding:
    from pycoll.backend import extension

    usable = extension().usable_cores()
    seen = f"{usable} of {os.cpu_count()}"
    remedy = "more ranks than cores share them: waiting ranks yield, which is right but not fast"
    return Finding("cores", "ok" if usable > 1 else "slow", seen, remedy if usable == 1 else "")


def limits() -> Finding:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    seen = f"{files:,} open files"
    if files != resource.RLIM_INFINITY and files < 256:
        return Finding("limits", "slow", seen, "ulimit -n 1024: each local peer takes two files")
    if space != resource.RLIM_INFINITY:
        seen += f", {space:,} bytes of address space"
        return Finding("limits", "slow", seen, "ulimit -v unlimited: peers' memory is mapped whole")
    return Finding("limits", "ok", seen + ", unlimited address space")


def _trial() -> float:
    """Seconds an 8-byte all_reduce takes; the sums are checked."""
    import torch
    import torch.distributed as dist

    n = dist.get_world_size()
    for numel in (2, 70_001):
        x = torch.full((numel,), dist.get_rank() + 1.0)
        dist.all_reduce(x)
        if not torch.equal(x, torch.full((numel,), n * (n + 1) / 2)):
            raise RuntimeError(f"a sum of {numel} elements is wrong: {x[0].item()}")
    x = torch.zeros(2)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(50):
            dist.all_reduce(x)
        times.append((time.perf_counter() - begin) / 50)
    return statistics.median(times)


def trial(ranks: int) -> Finding:
    from pycoll.testing import run_ranks

    what = f"all_reduce among {ranks} processes"
    try:
        seconds = max(run_ranks(_trial, ranks, timeout=60))
    except Exception as error:
        return Finding(what, "fails", str(error).splitlines()[0], "see what fails above")
    seen = f"right; 8 bytes take {seconds * 1e6:.1f} µs"
    slow = seconds > 1e-3
    return Finding(what, "slow" if slow else "ok", seen, "the machine is busy" if slow else "")


CHECKS: tuple[Callable[[], Finding], ...] = (
    shared_memory,
    passing_descriptors,
    watching_processes,
    sleeping_and_waking,
    cores,
    limits,
)


def print_diagnosis(ranks: int) -> int:
    from pycoll.backend import extension

    try:
        extension()
    except ImportError as error:
        print(error)
        return 1
    findings = [check() for check in CHECKS] + [trial(ranks)]
    print_rows(
        [(f.verdict, f.what, f.seen, f.remedy) for f in findings],
        ("", "what", "seen", "remedy"),
        {"ok": "green", "slow": "yellow", "fails": "red"},
    )
    return 1 if any(finding.verdict == "fails" for finding in findings) else 0
