"""The C++ tests of the core: plain, with ThreadSanitizer, with AddressSanitizer and UBSan."""

from __future__ import annotations

import os
import subprocess

import pytest
from native_programs import ROOT, SANITIZERS, build, programs, run

PROGRAMS = programs()
# The programs of one sanitizer are built together, which keeps all cores busy.
BUILT: set[str] = set()

CASES = [
    pytest.param(
        sanitizer,
        program,
        id=f"{sanitizer}-{program}",
        marks=[pytest.mark.slow],  # for the compiler
    )
    for sanitizer in SANITIZERS
    for program in PROGRAMS
]


@pytest.mark.parametrize(("sanitizer", "program"), CASES)
def test_program(sanitizer: str, program: str) -> None:
    if sanitizer not in BUILT:
        build(sanitizer, PROGRAMS)
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
