"""CUDA kernels, run on the CPU by the simulator of tests/sim (its README says how).

By default each protocol with some seeds, and a sample of kernel, dtype, op, size and number of ranks
in which all pairs meet; PYCOLL_TEST_FULL=1 runs the whole matrix and more seeds.
"""

from __future__ import annotations

import os

import pytest
from cuda_sim_programs import SANITIZERS, build, programs, run

PROGRAMS = programs()
BUILT: set[str] = set()


def built(sanitizer: str) -> None:
    """Programs of one sanitizer are built together, which keeps all cores busy."""
    if sanitizer in BUILT:
        return
    full = os.environ.get("PYCOLL_TEST_FULL") == "1"
    names = [name for name in PROGRAMS if full or not left_to_full(sanitizer, name)]
    build(sanitizer, names)
    BUILT.add(sanitizer)


def left_to_full(sanitizer: str, program: str) -> bool:
    """What takes long and adds little: all dtypes, and with ThreadSanitizer what has no new signals."""
    if sanitizer == "thread":
        return program not in ("test_simulator", "test_protocols")
    return sanitizer == "address" and program in (
        "test_collectives",
        "test_protocols",
        "test_quantised",
    )


def marks(sanitizer: str, program: str) -> list[pytest.MarkDecorator]:
    if left_to_full(sanitizer, program):
        return [pytest.mark.full, pytest.mark.slow]
    return [pytest.mark.slow]


CASES = [
    pytest.param(sanitizer, program, id=f"{sanitizer}-{program}", marks=marks(sanitizer, program))
    for sanitizer in SANITIZERS
    for program in PROGRAMS
]


@pytest.mark.parametrize(("sanitizer", "program"), CASES)
def test_program(sanitizer: str, program: str) -> None:
    built(sanitizer)
    outcome = run(sanitizer, program, timeout_s=3500)
    assert outcome.passed, outcome.output[-20000:]
    assert outcome.num_checks > 0, outcome.output


@pytest.mark.slow
def test_thread_sanitizer_sees_kernels() -> None:
    """Its silence about them means nothing unless it reports a race that is planted."""
    built("thread")
    outcome = run(
        "thread",
        "test_simulator",
        "random_interleavings_find_a_missing_barrier",
        variables={"PYCOLL_SIM_PLANTED": "1"},
    )
    assert not outcome.passed
    assert "data race" in outcome.output


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["none", "thread"])
def test_protocols_with_many_seeds(sanitizer: str) -> None:
    built(sanitizer)
    seeds = {"none": "150", "thread": "25"}[sanitizer]
    outcome = run(
        sanitizer, "test_protocols", variables={"PYCOLL_SIM_SEEDS": seeds}, timeout_s=3000
    )
    assert outcome.passed, outcome.output[-20000:]
