"""Launches of Triton kernels as specifications that tests/ptx/compile_kernels.py compiles, by this Triton or an older
one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pycoll.triton_kernels.launching import Launch

ROOT = Path(__file__).resolve().parents[1]
COMPILER = ROOT / "tests/ptx/compile_kernels.py"
# `make triton-3.6` installs it there, beside the one in requirements-dev.txt.
OLD_TRITON = ROOT / ".venv/triton-3.6"
OLD_TRITON_VARIABLE = "PYCOLL_TEST_OLD_TRITON"

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Specification:
    """A kernel as Triton specialises it."""

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    num_warps: int

    def as_json(self, name: str, arch: int) -> dict[str, Any]:
        return {
            "name": name,
            "module": self.module,
            "kernel": self.kernel,
            "signature": dict(self.signature),
            "constants": dict(self.constants),
            "aligned": list(self.aligned),
            "num_warps": self.num_warps,
            "arch": arch,
        }


def specification(launch: Launch) -> Specification:
    """As triton.jit would specialise these arguments."""
    function = launch.kernel.fn
    signature, constants, aligned = [], [], []
    for name in launch.kernel.arg_names:
        value = launch.arguments[name]
        if name.isupper():
            signature.append((name, "constexpr"))
            constants.append((name, value))
        elif isinstance(value, torch.Tensor):
            signature.append((name, "*" + TYPES[value.dtype]))
            if value.data_ptr() % 16 == 0:
                aligned.append(name)
        else:
            signature.append((name, "i32" if -(2**31) <= value < 2**31 else "i64"))
    return Specification(
        function.__module__,
        function.__name__,
        tuple(signature),
        tuple(constants),
        tuple(aligned),
        launch.num_warps,
    )


def old_triton() -> Path | None:
    """The folder that holds an older Triton, if there is one."""
    folder = Path(os.environ.get(OLD_TRITON_VARIABLE, OLD_TRITON))
    return folder if (folder / "triton").is_dir() else None


def compile_all(
    specifications: dict[str, Specification],
    arch: int,
    folder: Path,
    triton: Path | None = None,
    root: Path = ROOT,
) -> None:
    """Writes NAME.ptx, NAME.cubin and NAME.json for each.

    triton: the folder of another Triton than this process's. root: of the tree whose kernels are compiled.
    """
    text = json.dumps([what.as_json(name, arch) for name, what in specifications.items()])
    paths = [str(path) for path in (triton, root) if path is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("TRITON_INTERPRET", None)
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    done = subprocess.run(
        [sys.executable, str(COMPILER), str(folder)],
        input=text,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-8000:]
