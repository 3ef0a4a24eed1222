"""pycoll without Triton: everything but its Triton kernels works, and `pycoll info` says so."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from pycoll import triton_kernels
from pycoll.cli import info


def without_triton(code: str) -> subprocess.CompletedProcess[str]:
    """In a process where `import triton` fails."""
    hidden = f"import sys; sys.modules['triton'] = None; {code}"
    return subprocess.run(
        [sys.executable, "-c", hidden], capture_output=True, text=True, check=False, timeout=100
    )


def test_pycoll_imports_without_it() -> None:
    done = without_triton(
        "import pycoll, pycoll.backend, pycoll.ops, pycoll.parallel.ddp, pycoll.cli.info, "
        "pycoll.triton_kernels; print(pycoll.symmetric_empty(3).numel())"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3"


def test_a_kernel_needs_it() -> None:
    done = without_triton("import pycoll.triton_kernels.collectives")
    assert done.returncode != 0
    assert "triton" in done.stderr.splitlines()[-1]


def test_nothing_imports_it_unasked() -> None:
    code = "import sys, pycoll, pycoll.cli.info, pycoll.triton_kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0


def test_info_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(triton_kernels, "version", not_found)
    assert info.facts()["Triton kernels"] == "none: Triton is not installed (pip install triton)"
    monkeypatch.setattr(triton_kernels, "version", lambda name: "3.6.0")
    assert info.facts()["Triton kernels"] == "with Triton 3.6.0"
