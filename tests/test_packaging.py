"""What an installed pycoll consists of, and what it does when its parts do not fit together."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pycoll._version import __version__, check_torch_version

ROOT = Path(__file__).resolve().parents[1]
ENTRY_POINT = "pycoll.backend:register"
BUILD_RECORD = '"""Of no real build."""\n\nTORCH_VERSION = "{}"\nCOMPILER = "none"\n'
OTHER_TORCH = "1.99.0"

needs_backend = pytest.mark.skipif(
    not (ROOT / "pycoll/backend.py").is_file(), reason="pycoll/backend.py is not there yet"
)
needs_extension = pytest.mark.skipif(
    importlib.util.find_spec("pycoll._C") is None, reason="pycoll._C is not built"
)


def run_python(code: str, first_on_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds `first_on_path` before an installed pycoll."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=first_on_path,
        env=os.environ | {"PYTHONPATH": str(first_on_path)} | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def copy_of_pycoll(folder: Path, *, extension: bool, built_for: str | None = None) -> Path:
    """pycoll as installed in `folder`, with the metadata through which torch finds it."""
    left_out = ["__pycache__", "_build.py"] + ([] if extension else ["_C*.so"])
    shutil.copytree(ROOT / "pycoll", folder / "pycoll", ignore=shutil.ignore_patterns(*left_out))
    if built_for is not None:
        record = BUILD_RECORD.format(built_for)
        (folder / "pycoll/_build.py").write_text(record, encoding="utf-8")
    info = folder / f"pycoll-{__version__}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: pycoll\nVersion: {__version__}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    entry_points = f"[torch.backends]\npycoll = {ENTRY_POINT}\n"
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    return folder


# --- the torch that a build is for --------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "found"),
    [
        ("2.13.0", "2.13.0"),
        ("2.13.0+cpu", "2.13.0+cu130"),
        ("2.13.0", "2.13.1"),
        ("2.13.0a0+gitcf30153", "2.13.0"),
    ],
)
def test_same_minor_version_is_accepted(built: str, found: str) -> None:
    check_torch_version(built, found)


@pytest.mark.parametrize(
    ("built", "found"),
    [("2.13.0", "2.14.0"), ("2.13.0+cpu", "2.1.3"), ("2.1.0", "2.10.0"), ("2.13.0", "3.13.0")],
)
def test_other_minor_version_is_refused(built: str, found: str) -> None:
    with pytest.raises(ImportError) as caught:
        check_torch_version(built, found)
    message = str(caught.value)
    assert f"built for torch {built}" in message
    assert f"torch {found} is installed" in message
    assert "pip install --no-build-isolation" in message


USE_PYCOLL = """
import torch.distributed as dist
import pycoll
dist.init_process_group("pycoll", store=dist.HashStore(), rank=0, world_size=1)
"""


@needs_backend
@needs_extension
def test_other_torch_is_one_import_error(tmp_path: Path) -> None:
    """Whoever uses pycoll gets one error that says all, and no second one from its handling."""
    import torch

    folder = copy_of_pycoll(tmp_path, extension=True, built_for=OTHER_TORCH)
    result = run_python(USE_PYCOLL, folder, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert result.returncode != 0
    errors = re.findall(r"^\w+(?:Error|Exception)\b.*", result.stderr, re.MULTILINE)
    assert len(errors) == 1, result.stderr
    assert errors[0].startswith("ImportError: pycoll"), result.stderr
    for part in (OTHER_TORCH, torch.__version__, "--no-build-isolation"):
        assert part in errors[0]


# --- `import torch` loads pycoll, whatever its state --------------------------------------------

IMPORT_TORCH = """
import sys, torch
assert "pycoll.backend" in sys.modules or "pycoll" in sys.modules, "torch did not look for pycoll"
print(torch.ones(3).sum().item(), sys.modules["pycoll"].__file__)
"""


@needs_backend
@pytest.mark.parametrize("fault", ["none", "no extension", "other torch"])
def test_import_torch_works_with(fault: str, tmp_path: Path) -> None:
    if fault != "no extension" and importlib.util.find_spec("pycoll._C") is None:
        pytest.skip("pycoll._C is not built")
    import torch

    built_for = OTHER_TORCH if fault == "other torch" else torch.__version__
    folder = copy_of_pycoll(tmp_path, extension=fault != "no extension", built_for=built_for)
    result = run_python(IMPORT_TORCH, folder, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["3.0", str(folder / "pycoll/__init__.py")]


# --- requirements -------------------------------------------------------------------------------


def test_every_import_is_a_pinned_requirement() -> None:
    pinned = set()
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.match(r'([\w-]+)==[\w.]+(; python_version [<>=]+ "3\.\d+")?$', line)
            assert match, f"not pinned: {line}"
            pinned.add(match[1].replace("-", "_").lower())
    # triton comes with the CUDA builds of torch; scikit-learn is for one example, which says so; the benchmark
    # skips MPI, and the names of GPUs' links, where their libraries are missing.
    optional = {"triton", "sklearn", "mpi4py", "pynvml"}
    for file in sorted((ROOT / "pycoll").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            roots = {name.split(".")[0] for name in names} - {"pycoll"} - sys.stdlib_module_names
            assert roots <= pinned | optional, f"{file.relative_to(ROOT)}:{node.lineno}"


# --- the build ----------------------------------------------------------------------------------


def copy_of_source_tree(folder: Path) -> Path:
    """What a build reads, with the compiled objects of this tree so that little is left to do."""
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy2(ROOT / name, folder / name)
    generated = shutil.ignore_patterns("__pycache__", "_build.py", "_C*.so")
    for name in ("csrc", "pycoll"):
        shutil.copytree(ROOT / name, folder / name, ignore=generated)
    for objects in (ROOT / "build").glob(f"{sys.implementation.cache_tag}-torch*"):
        shutil.copytree(objects, folder / "build" / objects.name)
    return folder


def build_wheel(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    return subprocess.run(
        [*pip, "-w", str(folder / "wheel"), str(folder)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@needs_backend
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")
def test_wheel_is_complete(tmp_path: Path) -> None:
    import torch

    result = build_wheel(copy_of_source_tree(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"pycoll-{__version__}.dist-info"
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read(f"{info}/entry_points.txt").decode())
        record = archive.read("pycoll/_build.py").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert entry_points["torch.backends"]["pycoll"] == ENTRY_POINT
    assert any(re.fullmatch(r"pycoll/_C\.[\w-]+\.so", name) for name in names), names
    modules = (p for p in (ROOT / "pycoll").rglob("*.py*") if "__pycache__" not in p.parts)
    assert {str(path.relative_to(ROOT)) for path in modules} <= names
    assert "pycoll/py.typed" in names
    assert not any(name.startswith(("csrc", "tests", "benchmarks")) for name in names), names
    assert f'TORCH_VERSION = "{torch.__version__}"' in record
    assert not re.search(r"\b20\d\d-\d\d", record), "a build record carries no date"
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"Requires-Dist: torch=={minor}.*" in metadata


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")
def test_build_without_torch_says_what_to_do(tmp_path: Path) -> None:
    """A path hook hides torch from the build."""
    hidden = "import sys\nsys.modules['torch'] = None\n"
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide/sitecustomize.py").write_text(hidden, encoding="utf-8")
    (tmp_path / "tree").mkdir()
    tree = copy_of_source_tree(tmp_path / "tree")
    result = build_wheel(tree, PYTHONPATH=str(tmp_path / "hide"))
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert "pip install --no-build-isolation ." in output
    assert "Traceback" not in output
