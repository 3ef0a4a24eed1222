"""The PTX that Triton emits for its kernels, translated to C++ and run on the simulator of tests/sim.

Layers: "strong" (random interleavings, values, accesses beside buffers, deadlocks), "weak" (weak memory and its race
detector), "thread" (ThreadSanitizer). Each for the installed Triton and for an older one, which puts no barrier before
a
release: `make triton-3.6` installs it, and without it those tests skip.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import pytest
from native_programs import Outcome

pytest.importorskip("triton", reason="Triton is not installed")

import triton_simulation
from triton_cases import CASES, COLLECTIVES, ONLY_IN_FULL, build_case
from triton_compiler import OLD_TRITON_VARIABLE, Specification, old_triton
from triton_simulation import Program, arena_in

FULL = os.environ.get("PYCOLL_TEST_FULL") == "1"
ARCH = 90
LAYERS = {"strong": ("none", "strong"), "weak": ("none", "weak"), "thread": ("thread", "strong")}
SEEDS = {"strong": 12, "weak": 5, "thread": 2}
TRITONS = ("installed", "3.6")


def wanted_cases() -> list[str]:
    return [name for name in CASES if FULL or name not in ONLY_IN_FULL]


def folder_of(triton: str) -> Path | None:
    """Of the older Triton; None for the installed one."""
    if triton == "installed":
        return None
    folder = old_triton()
    if folder is None:
        pytest.skip(
            f"Triton {triton} is not there: `make triton-{triton}`, or {OLD_TRITON_VARIABLE}"
        )
    return folder


@functools.cache
def case_folder() -> tempfile.TemporaryDirectory[str]:
    """Of all cases; it goes when the process ends."""
    return tempfile.TemporaryDirectory(prefix="pycoll-triton-")


@functools.cache
def case_file(name: str) -> tuple[Path, dict[str, Specification]]:
    folder = Path(case_folder().name) / name
    folder.mkdir()
    with arena_in(folder) as arena:
        case = build_case(name, arena)
        return case.write(folder), case.specifications()


@functools.cache
def program(triton: str) -> Program:
    """Of all cases, compiled and translated; built for a layer when it is run first."""
    specifications: dict[str, Specification] = {}
    for name in wanted_cases():
        specifications |= case_file(name)[1]
    built = Program(triton_simulation.FOLDER / "build" / f"triton-{triton}")
    built.compile(specifications, ARCH, folder_of(triton))
    return built


@functools.cache
def build(triton: str, sanitizer: str) -> None:
    """What the sanitizer's layers run."""
    names = [
        name
        for name in wanted_cases()
        if sanitizer != "thread" or FULL or is_in_sample(triton, "thread", name)
    ]
    program(triton).build(sanitizer, {kernel for name in names for kernel in case_file(name)[1]})


def is_in_sample(triton: str, layer: str, name: str) -> bool:
    """Orders of memory are looked at where there are signals; of the older Triton the three kinds of protocol."""
    if layer == "strong" and triton == "installed":
        return name not in ONLY_IN_FULL
    if triton == "installed":
        return name in COLLECTIVES
    return name in ("one_shot", "two_shot", "ring") and layer != "strong"


def run(triton: str, name: str, layer: str, seeds: int | None = None) -> Outcome:
    sanitizer, memory = LAYERS[layer]
    folder_of(triton)
    build(triton, sanitizer)
    if seeds is None:
        seeds = SEEDS[layer] * (10 if FULL else 1)
    return program(triton).run(case_file(name)[0], sanitizer, memory, seeds)


def cases() -> list[object]:
    found = []
    for triton in TRITONS:
        for layer in LAYERS:
            for name in CASES:
                left_out = not is_in_sample(triton, layer, name)
                marks = [pytest.mark.slow, *([pytest.mark.full] if left_out else [])]
                found.append(
                    pytest.param(triton, layer, name, id=f"{triton}-{layer}-{name}", marks=marks)
                )
    return found


@pytest.mark.parametrize(("triton", "layer", "name"), cases())
def test_kernels(triton: str, layer: str, name: str) -> None:
    outcome = run(triton, name, layer)
    assert outcome.passed, outcome.output[-6000:]
    assert "0 failures" in outcome.output
