"""Builds and runs the programs of tests/sim, which run CUDA kernels on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import native_programs
from native_programs import WRONG_LAYOUT, Outcome, missing

ROOT = native_programs.ROOT
FOLDER = ROOT / "tests/sim"
SANITIZERS = native_programs.SANITIZERS
# Objects that do not depend on the kernels' code: trees with a planted bug share them.
SHARED_OBJECTS = (
    "test_protocols.o",
    "collective_case.o",
    "base/error.o",
    "memory/shared_heap.o",
    "memory/segment.o",
    "bootstrap/unix_socket.o",
)


def programs() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("test_*.cpp"))


def build(
    sanitizer: str,
    names: list[str],
    variables: dict[str, str] | None = None,
    timeout_s: float = 900,
) -> None:
    """Brings programs up to date. `variables` are the Makefile's; BUILD says where they are built."""
    if shutil.which("make") is None or shutil.which(os.environ.get("CXX", "g++")) is None:
        missing("make and g++ are needed (on Debian: apt-get install make g++)")
    variables = {"BUILD": f"build/{sanitizer}", **(variables or {})}
    done = subprocess.run(
        [
            "make",
            "-j",
            native_programs.JOBS,
            f"SANITIZER={sanitizer}",
            *(f"{key}={value}" for key, value in variables.items()),
            *(f"{variables['BUILD']}/{name}" for name in names),
        ],
        cwd=FOLDER,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if "cannot find -l" in done.stdout:
        missing(f"the compiler has no library for the sanitizer {sanitizer}:\n{done.stdout}")
    assert done.returncode == 0, done.stdout[-10000:]


def run(
    sanitizer: str,
    name: str,
    *tests: str,
    build_folder: Path | None = None,
    variables: dict[str, str] | None = None,
    timeout_s: float = 400,
) -> Outcome:
    """Runs the tests of a program whose names contain one of `tests`, or all."""
    folder = build_folder or FOLDER / "build" / sanitizer
    settings = [f"{key}={value}" for key, value in (variables or {}).items()]
    return run_command(sanitizer, ["env", *settings, str(folder / name), *tests], timeout_s)


def run_command(sanitizer: str, command: list[str], timeout_s: float = 400) -> Outcome:
    """Runs a program that was built with the simulator."""
    outcome = native_programs._run(command, timeout_s)
    if sanitizer == "thread" and WRONG_LAYOUT in outcome.output and shutil.which("setarch"):
        outcome = native_programs._run(["setarch", "-R", *command], timeout_s)
    if WRONG_LAYOUT in outcome.output:
        missing("ThreadSanitizer does not work on this kernel (sysctl vm.mmap_rnd_bits=28 helps)")
    return outcome


def share_objects(sanitizer: str, build_folder: Path) -> None:
    """Copies the objects that trees have in common, with their times, so that make keeps them."""
    for name in SHARED_OBJECTS:
        (build_folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(FOLDER / "build" / sanitizer / name, build_folder / name)
