"""tools/gpu_check.py: what it does without a GPU, on the simulator, and when a part of it goes wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from simulated_kernels import library_path

ROOT = Path(__file__).resolve().parents[1]
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load(ROOT / "tools/gpu_check.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/gpu_check.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_without_a_gpu_the_plan_is_printed(tmp_path: Path, script: ModuleType) -> None:
    output = tmp_path / "check.json"
    done = run("--output", str(output))
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout
    assert all(part.name in done.stdout for part in script.PARTS)
    assert not output.exists()


@pytest.mark.slow
def test_the_simulator_passes(tmp_path: Path) -> None:
    output = tmp_path / "check.json"
    library_path()
    done = run("--simulate", "--output", str(output))
    assert done.returncode == 0, done.stdout + output.read_text()
    parts = json.loads(output.read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "streams_2": "ok",
        "processes_2": "ok",
        "operators": "ok",
        "wrappers": "ok",
        "triton": "ok" if HAS_TRITON else "skipped",
    }


@pytest.mark.slow
def test_a_wrong_result_is_told(tmp_path: Path, script: ModuleType) -> None:
    """The check itself, with sums that it must refuse."""
    (tmp_path / "broken.py").write_text(
        "import sys; sys.path[:0] = ['tools/gpu_parts', 'tests']\n"
        "import correctness, json\n"
        "right = correctness.summed\n"
        "correctness.summed = lambda n, numel, dtype: right(n, numel, dtype).roll(1)\n"
        "print(json.dumps(correctness.streams('2')))\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "broken.py")],
        cwd=ROOT,
        env=os.environ | {"PYCOLL_GPU_CHECK_SIMULATE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    wrong = json.loads(done.stdout)["wrong"]
    assert any("all_reduce of 1009" in text for text in wrong), done.stdout + done.stderr
    del script


BROKEN_KERNELS = """
import os
import sys

sys.path[:0] = ["tools/gpu_parts", "tests"]
import run
import triton_values
from pycoll.testing import RankPool
from pycoll.triton_kernels import launching


def start_wrongly(launch):
    right(launch)
    if launch.kernel.fn.__name__ == "quantise_kernel":
        launch.arguments["codes"].view(triton_values.torch.int8)[5] += 1


def die():
    with RankPool(1) as pool:
        return pool.run(os._exit, 7)


right, launching._start = launching._start, start_wrongly
checks = triton_values.CHECKS
triton_values.CHECKS = {name: checks[name] for name in ("quantisation", "deadline")} | {"processes": die}
triton_values.QUANTISED = triton_values.QUANTISED[:1]
if __name__ == "__main__":  # and not where a rank loads this file
    sys.argv = ["run.py", "triton_values", sys.argv[1]]
    sys.exit(run.main())
"""


@needs_triton
@pytest.mark.slow
def test_a_wrong_triton_kernel_and_a_rank_that_dies_are_told(
    tmp_path: Path, script: ModuleType
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN_KERNELS, encoding="utf-8")
    part = script.Part("triton", "", 240.0, (sys.executable, str(broken), "{result}"))
    environment = os.environ | {"PYCOLL_GPU_CHECK_SIMULATE": "1", "PYTHONPATH": str(ROOT)}
    output = tmp_path / "check.json"
    assert not script.run([part], output, environment, 300.0)
    found = json.loads(output.read_text())["parts"]["triton"]
    assert found["status"] == "failed"
    assert found["exit_status"] == 1
    codes, elements, died = found["wrong"]  # the deadline is as it should be
    for text, what in ((codes, "codes"), (elements, "elements")):
        assert f"quantisation: torch.float32 torch.float8_e4m3fn 131 by 17: {what}: 1 of" in text
        assert "the first at 5 " in text
    assert died.startswith("processes: RankError: ")
    assert "rank 0 died" in died


COMPILES_FIRST = """
import json
import sys

sys.path[:0] = ["tools/gpu_parts", "tests"]
import torch
import triton
from triton.backends.compiler import GPUTarget

torch.set_num_threads(1)
import triton_values as part
from triton_compiler import specification


class Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


triton.runtime.driver.set_active(Driver())
first = {specification(launch): launch for launch in part.all_launches()}
missing = set()
for n in (3, 8):
    groups = part.groups_of(n, part.ON_CPU, [0] * n)
    for case in part.cases():
        for rank, group in enumerate(groups):
            for launch in part.launches_of(part.trial_of(case, rank, n, 0, "cpu").start, group):
                if specification(launch) not in first:
                    missing.add(f"{case}, rank {rank} of {n}")
targets = {}
for launch in first.values():
    name = launch.kernel.fn.__name__
    if name in ("bucket_kernel", "all_gather_kernel") and name not in targets:
        targets[name] = part.compiled(launch).asm["ptx"].split(".target ")[1][:5]
print(json.dumps([len(first), sorted(missing), targets]))
"""


@needs_triton
@pytest.mark.slow
def test_all_triton_kernels_of_the_checks_are_compiled_first(tmp_path: Path) -> None:
    """No GPU is needed to compile. What ranks compile only when others wait for them takes time from the checks."""
    (tmp_path / "program.py").write_text(COMPILES_FIRST, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    number, missing, targets = json.loads(done.stdout)
    assert 80 < number < 130
    assert missing == []
    assert targets == {"bucket_kernel": "sm_90", "all_gather_kernel": "sm_90"}


def test_a_part_that_goes_wrong_does_not_take_the_rest(tmp_path: Path, script: ModuleType) -> None:
    def part(name: str, code: str, **more: object) -> object:
        command = (sys.executable, "-c", code, "{result}")
        return script.Part(name, "", **{"limit_s": 20.0, "command": command, **more})

    leaves_a_child = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    write = "import sys; open(sys.argv[1], 'w').write('{\"rate\": 7}')"
    output = tmp_path / "check.json"
    parts = [
        part("crashes", "import os; print('last words', flush=True); os.abort()"),
        part("hangs", leaves_a_child, limit_s=2.0),
        part("lacks", "", needs="no-such-program"),
        part("works", write),
        part("fails_after_it_has_measured", write + "; sys.exit(1)"),
        part("ended_while_it_writes", write.replace("7}", "7") + "; sys.exit(1)"),
        part("works_still", write),
    ]
    assert not script.run(parts, output, dict(os.environ), 60.0)
    found = json.loads(output.read_text())["parts"]
    assert [found[p.name]["status"] for p in parts] == [
        "failed",
        "timed out",
        "skipped",
        "ok",
        "failed",
        "failed",
        "ok",
    ]
    assert "Expecting" in found["ended_while_it_writes"]["unreadable"]
    assert "last words" in found["crashes"]["tail"]
    assert found["works"]["rate"] == found["fails_after_it_has_measured"]["rate"] == 7
    child = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or child.read_text().split()[2] == "Z", "a part's child lives on"
    assert script.run([part("late", "")], output, dict(os.environ), 0.5)
    assert json.loads(output.read_text())["parts"]["late"]["status"] == "skipped"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "stream_2"), "'stream_2', which is no part; the parts are build, streams_2"),
        (("--only", ""), "'', which is no part"),
        (
            ("--simulate", "--only", "build"),
            "build, which needs a GPU; the simulator runs streams_2",
        ),
        (("--simulate", "--total", "0"), "--total is 0; give seconds above 0"),
        (("--simulate", "--total", "nan"), "--total is nan"),
        (
            ("--simulate", "--output", "README.md/check.json"),
            "README.md/check.json cannot be written",
        ),
        (("--simulate", "--output", "tests"), "tests cannot be written (it is a folder)"),
    ],
)
def test_arguments_are_checked_before_anything_runs(
    script: ModuleType,
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
    monkeypatch.setattr(script, "run", lambda *_: pytest.fail("parts ran"))
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert said in capsys.readouterr().err


def test_limits_leave_room_for_all(script: ModuleType) -> None:
    assert script.TOTAL_S < 8 * 60
    assert all(5 <= part.limit_s < script.TOTAL_S for part in script.PARTS)
