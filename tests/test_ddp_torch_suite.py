"""torch's shipped tests of DistributedDataParallel, with pycoll's in its place; those that run without a GPU.

What they ask of torch's log of a wrapper's settings pycoll's does not have; those tests are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_torch_suite import RUNNER

TESTS = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_ddp_create_graph",
)


@pytest.mark.slow
@pytest.mark.skipif(not RUNNER.exists(), reason=f"there is no {RUNNER.name} beside this checkout")
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_suite_takes_the_wrapper(tmp_path: Path, world_size: int) -> None:
    outcomes = tmp_path / "outcomes.json"
    command = [sys.executable, str(RUNNER), "--backend", "pycoll", "--import", "pycoll.backend"]
    command += ["--import", "torch_suite_ddp", "--world-size", str(world_size)]
    for name in TESTS:
        command += ["-k", name]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--json", str(outcomes)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert outcomes.exists(), done.stdout + done.stderr
    report = json.loads(outcomes.read_text())
    states = {name.rpartition(".")[2]: t["status"] for name, t in report["tests"].items()}
    assert states.keys() >= set(TESTS)
    assert set(states.values()) == {"passed"}, done.stdout
