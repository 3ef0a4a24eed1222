"""What torch ships for its own tests, over pycoll: its distributed suite and the bases of its test classes.

In the suite nothing may fail, and no less may pass than over gloo. It is made for the backends that torch
knows; the program that runs it for another one lies beside this repository, and where it does not, there is
nothing to run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).parents[2] / "shared" / "peers" / "run_distributed_test.py"
WORLD_SIZE = 3
# Of the suite of torch 2.13 as many pass over gloo on three ranks, tests of all_to_all included,
# which the suite itself keeps for MPI.
PASSED_OVER_GLOO = 97

BASES = Path(__file__).with_name("torch_bases.py")

# Where this is set, torch's own programs write reports, and need a package for it.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "CI"}

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not RUNNER.exists(), reason=f"there is no {RUNNER.name} beside this checkout")
def test_the_suite_passes(tmp_path: Path) -> None:
    outcomes = tmp_path / "outcomes.json"
    command = [sys.executable, str(RUNNER), "--backend", "pycoll", "--import", "pycoll.backend"]
    command += ["--world-size", str(WORLD_SIZE), "--alltoall", "--json", str(outcomes), "-q"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=900, env=ENVIRONMENT
    )
    assert outcomes.exists(), done.stdout + done.stderr
    report = json.loads(outcomes.read_text())
    assert report["meta"]["complete"], done.stdout + done.stderr
    wrong = {
        name: test["detail"]
        for name, test in report["tests"].items()
        if test["status"] not in ("passed", "skipped")
    }
    assert not wrong, "\n\n".join(f"{name}:\n{detail}" for name, detail in wrong.items())
    assert report["meta"]["counts"]["passed"] >= PASSED_OVER_GLOO


def test_the_bases_of_test_classes(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's bases need it")
    command = [sys.executable, str(BASES), "-v"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ran 4 tests" in done.stderr
    assert "skipped" not in done.stderr
