"""The C++ tests of the core: plain, with ThreadSanitizer, with AddressSanitizer and UBSan."""

from __future__ import annotations

import os
import subprocess

import pytest
from native_programs import ROOT, SANITIZERS, build, programs, run

PROGRAMS = programs()
# The programs of one sanitizer are built together, which keeps all cores busy.
BUILT: set[str] = set()

# ThreadSanitizer has nothing to see in them: neither threads nor memory that processes share. They run plain
# as well, with the instructions that are shipped; all others run with both sanitizers.
SINGLE_THREADED = {
    "test_bucket",
    "test_conversions",
    "test_kernels",
    "test_quantise",
    "test_topology",
}


def left_to_full(sanitizer: str, program: str) -> bool:
    single_threaded = program in SINGLE_THREADED
    return single_threaded if sanitizer == "thread" else sanitizer == "none" and not single_threaded


CASES = [
    pytest.param(
        sanitizer,
        program,
        id=f"{sanitizer}-{program}",
        marks=[pytest.mark.slow]  # for the compiler
        + [pytest.mark.full] * left_to_full(sanitizer, program),
    )
    for sanitizer in SANITIZERS
    for program in PROGRAMS
]


@pytest.mark.parametrize(("sanitizer", "program"), CASES)
def test_program(sanitizer: str, program: str) -> None:
    if sanitizer not in BUILT:
        full = os.environ.get("PYCOLL_TEST_FULL") == "1"
        build(sanitizer, [name for name in PROGRAMS if full or not left_to_full(sanitizer, name)])
        BUILT.add(sanitizer)
    outcome = run(sanitizer, program)
    assert outcome.passed, outcome.output[-20000:]
    assert outcome.num_checks > 0, outcome.output


def test_a_failing_check_fails_the_program() -> None:
    """Nothing of the above means anything unless a failure reaches the exit status."""
    build("none", ["test_topology"])
    outcome = run("none", "test_topology", "no such test")
    assert not outcome.passed
    assert outcome.num_checks == 0


def test_run_sh_can_be_called() -> None:
    script = ROOT / "tests/native/run.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
