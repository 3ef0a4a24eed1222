"""When setup.py builds the library of CUDA kernels, and what pycoll says of it."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import setuptools
from test_packaging import copy_of_source_tree

ROOT = Path(__file__).resolve().parents[1]
FAKE_NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.1'\n"
VARIABLES = ("PYCOLL_CUDA", "PYCOLL_CUDA_ARCHS", "CUDA_HOME")


@pytest.fixture
def setup_script(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return SimpleNamespace(**runpy.run_path(str(ROOT / "setup.py")))


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that only knows its version, first in PATH."""
    path = tmp_path / "bin/nvcc"
    path.parent.mkdir()
    path.write_text(FAKE_NVCC, encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return path


@pytest.fixture
def no_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def torch_with(setup_script: SimpleNamespace, cuda: str | None) -> Any:
    return setup_script.TorchInstall(Path("/nowhere"), "2.13.0+x", cuda)


def test_torch_decides_unless_it_is_said(
    setup_script: SimpleNamespace, nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, with_cuda = (torch_with(setup_script, cuda) for cuda in (None, "13.0"))
    found = setup_script.Cuda.find(with_cuda)
    assert (found.nvcc, found.archs) == (str(nvcc), ("90a",))
    assert found.description == "sm_90a, by nvcc 13.0"
    assert setup_script.Cuda.find(without).nvcc is None
    assert "has no CUDA (PYCOLL_CUDA=1" in setup_script.Cuda.find(without).description
    monkeypatch.setenv("PYCOLL_CUDA", "1")
    monkeypatch.setenv("PYCOLL_CUDA_ARCHS", "80,sm_100")
    assert setup_script.Cuda.find(without).archs == ("80", "100")
    monkeypatch.setenv("PYCOLL_CUDA", "0")
    assert setup_script.Cuda.find(with_cuda).nvcc is None


@pytest.mark.usefixtures("no_nvcc")
def test_without_nvcc(setup_script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_with(setup_script, "13.0")
    found = setup_script.Cuda.find(torch)
    assert (found.nvcc, found.description) == (None, "nvcc was not found when it was built")
    monkeypatch.setenv("PYCOLL_CUDA", "1")
    with pytest.raises(SystemExit, match=r"PYCOLL_CUDA=1 .*nvcc .*install a CUDA toolkit, set"):
        setup_script.Cuda.find(torch)


@pytest.mark.parametrize(
    ("name", "value"), [("PYCOLL_CUDA", "yes"), ("PYCOLL_CUDA_ARCHS", "hopper")]
)
@pytest.mark.usefixtures("nvcc")
def test_wrong_values_are_refused(
    setup_script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"{name} is '{value}'"):
        setup_script.Cuda.find(torch_with(setup_script, "13.0"))


def test_the_ninja_file_names_every_kernel(setup_script: SimpleNamespace, nvcc: Path) -> None:
    torch = torch_with(setup_script, "13.0")
    tools = setup_script.Toolchain("g++", "", "ninja", Path("/python"))
    folder = Path("build/x")

    def text(cuda: Any) -> str:
        return str(setup_script.ninja_file(tools, torch, cuda, folder, folder / "_C.so"))

    built = text(setup_script.Cuda.find(torch))
    assert "-gencode arch=compute_90a,code=sm_90a" in built
    for path in (ROOT / "csrc/kernels/cuda").glob("*.cu"):
        line = f"build build/x/csrc/kernels/cuda/{path.stem}.o: cuda csrc/kernels/cuda/{path.name}"
        assert line in built
    assert "cuda" not in re.sub(r"csrc/\S+", "", text(setup_script.Cuda(None, (), "")))


@pytest.mark.skipif(shutil.which("ninja") is None, reason="ninja is not in PATH")
def test_a_build_that_lacks_nvcc_says_one_thing(tmp_path: Path) -> None:
    tree = copy_of_source_tree(tmp_path)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree,
        env=os.environ | {"PYCOLL_CUDA": "1", "CUDA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "nvcc is neither in CUDA_HOME nor in PATH" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tree / "pycoll").glob("_C*.so"))


USE_LIBRARY = """
import ctypes
from pycoll import _cuda
library = _cuda.load()
assert library.pycoll_cuda_launchers()
assert library.pycoll_cuda_driver()
print(_cuda.describe())
"""


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not in PATH")
def test_a_build_with_nvcc(tmp_path: Path) -> None:
    """Takes minutes. Neither a GPU nor a driver is needed to load what comes out."""
    tree = copy_of_source_tree(tmp_path)

    def build(choice: str) -> None:
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
            cwd=tree,
            env=os.environ | {"PYCOLL_CUDA": choice, "PYCOLL_CUDA_ARCHS": "80", "MAX_JOBS": "2"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    build("1")
    done = subprocess.run(
        [sys.executable, "-c", USE_LIBRARY],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sm_80, by nvcc ")
    build("0")
    assert not (tree / "pycoll/libpycoll_cuda.so").exists()
