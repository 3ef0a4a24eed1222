"""Builds and runs the C++ tests of tests/native, plain or with a sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SANITIZERS = ("none", "thread", "address")
JOBS = os.environ.get("MAX_JOBS", "2")
# Without it ThreadSanitizer goes on after its first report, and prints hundreds of them.
OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1 second_deadlock_stack=1"}
# ThreadSanitizer of older compilers cannot live with every layout of the address space.
WRONG_LAYOUT = "unexpected memory mapping"


@dataclass(frozen=True)
class Outcome:
    status: int
    output: str

    @property
    def passed(self) -> bool:
        return self.status == 0

    @property
    def num_checks(self) -> int:
        match = re.search(r"^\d+ tests, (\d+) checks, \d+ failures$", self.output, re.MULTILINE)
        return int(match[1]) if match else 0


def programs(root: Path = ROOT) -> list[str]:
    return sorted(path.stem for path in (root / "tests/native").glob("test_*.cpp"))


def build(sanitizer: str, names: list[str], root: Path = ROOT, timeout_s: float = 600) -> None:
    """Brings programs up to date; their objects are kept."""
    if shutil.which("make") is None or shutil.which(os.environ.get("CXX", "g++")) is None:
        missing("make and g++ are needed (on Debian: apt-get install make g++)")
    targets = [f"build/{sanitizer}/{name}" for name in names]
    done = subprocess.run(
        ["make", "-j", JOBS, f"SANITIZER={sanitizer}", *targets],
        cwd=root / "tests/native",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if "cannot find -l" in done.stdout or "libclang_rt" in done.stdout:
        missing(f"the compiler has no library for the sanitizer {sanitizer}:\n{done.stdout}")
    assert done.returncode == 0, done.stdout


def run(
    sanitizer: str, name: str, *tests: str, root: Path = ROOT, timeout_s: float = 300
) -> Outcome:
    """Runs the tests of a program whose names contain one of `tests`, or all.

    A program that does not end in time counts as failed.
    """
    command = [str(root / "tests/native/build" / sanitizer / name), *tests]
    outcome = _run(command, timeout_s)
    if sanitizer == "thread" and WRONG_LAYOUT in outcome.output and shutil.which("setarch"):
        outcome = _run(["setarch", "-R", *command], timeout_s)
    if WRONG_LAYOUT in outcome.output:
        missing("ThreadSanitizer does not work on this kernel (sysctl vm.mmap_rnd_bits=28 helps)")
    return outcome


def _run(command: list[str], timeout_s: float) -> Outcome:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=os.environ | OPTIONS,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        printed = expired.stdout or b""
        text = printed if isinstance(printed, str) else printed.decode(errors="replace")
        return Outcome(-1, f"{text}\ndid not end within {timeout_s} s")
    return Outcome(done.returncode, done.stdout)


def missing(reason: str) -> None:
    """Skips a test for want of a tool, unless the tools are said to be there."""
    if os.environ.get("PYCOLL_REQUIRE_TOOLS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
