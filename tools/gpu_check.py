"""Checks and measures pycoll on a machine with one GPU, in under 8 minutes; no network is needed.

    python tools/gpu_check.py                     # all parts, JSON under benchmarks/results/
    python tools/gpu_check.py --only streams_2    # one of them
    python tools/gpu_check.py --simulate          # what a CPU can do of it, for tests of this script

Each part is a process of its own with a time limit of its own: one that fails, crashes or hangs does not take the
others with it. The file is written after each part. Without a GPU the plan is printed and the status is 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "benchmarks/results/gpu_check.json"
TOTAL_S = 470.0
TAIL_CHARACTERS = 4000
# A simulator, or an interpreter, on cores that other programs share.
SIMULATED_LIMIT_S = 240.0
# Ranks share the GPU: docs/cuda_path.md, "A group gets ready".
ENVIRONMENT = {
    "CUDA_MODULE_LOADING": "EAGER",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "PYCOLL_CUDA": "1",
}


@dataclass(frozen=True)
class Part:
    name: str
    what: str
    limit_s: float
    command: tuple[str, ...]  # {result}: where it writes what it has found, as JSON
    simulated: bool = False  # whether a CPU can do it
    needs: str = ""  # a program


def _module(function: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(ROOT / "tools/gpu_parts/run.py"), function, "{result}", *arguments)


def _sanitizer(tool: str) -> tuple[str, ...]:
    options = ("--tool", tool, "--error-exitcode", "9", "--print-limit", "5")
    return ("compute-sanitizer", *options, *_module("streams", "2", "small"))


PARTS = (
    Part(
        "build",
        "compile pycoll with its CUDA kernels for this GPU",
        170,
        (sys.executable, "setup.py", "-q", "build_ext", "--inplace"),
    ),
    *(
        Part(
            f"streams_{n}",
            f"every kernel and collective, {n} ranks as threads with a stream each",
            30,
            _module("streams", str(n)),
            simulated=n == 2,
        )
        for n in (2, 4, 8)
    ),
    *(
        Part(
            f"processes_{n}",
            f"every collective, {n} ranks as processes",
            40,
            _module("processes", str(n)),
            simulated=n == 2,
        )
        for n in (2, 4, 8)
    ),
    Part(
        "memcheck",
        "compute-sanitizer memcheck over a small case",
        50,
        _sanitizer("memcheck"),
        needs="compute-sanitizer",
    ),
    Part(
        "racecheck",
        "compute-sanitizer racecheck over a small case",
        50,
        _sanitizer("racecheck"),
        needs="compute-sanitizer",
    ),
    Part(
        "operators",
        "pycoll.ops on the GPU: the CPU's bits, also in graphs and beyond 2^31 elements",
        25,
        _module("operators"),
        simulated=True,
    ),
    Part(
        "wrappers",
        "DistributedDataParallel, ZeroRedundancyOptimizer and SyncBatchNorm, 2 ranks as processes, beside one process",
        60,
        _module("wrappers", "2"),
        simulated=True,
    ),
    Part(
        "buckets",
        "pycoll.ops' flatten and unflatten in GB/s beside a device-to-device copy and _foreach_copy_; "
        "goal: 0.9 of the copy",
        30,
        _module("buckets"),
    ),
    Part(
        "all_reduce",
        "all_reduce of ranks as streams over its floor, the bytes that must move by the copy's rate; "
        "goal: 0.85",
        40,
        _module("all_reduce"),
    ),
    Part("latency", "small all_reduce and barrier in microseconds", 30, _module("latency")),
    Part(
        "symm_mem",
        "torch's symm_mem one_shot and two_shot beside pycoll's, ranks as processes",
        45,
        _module("symm_mem"),
    ),
    Part("nccl", "NCCL with several ranks on the GPU, where it allows it", 45, _module("nccl")),
    Part(
        "triton",
        "every Triton kernel to the bit: ranks as processes and as streams, and a deadline",
        60,
        _module("triton_values"),
        simulated=True,
    ),
    Part(
        "triton_rates",
        "Triton kernels: flatten over the rate of a copy, all_reduce of ranks as streams beside its floor",
        30,
        _module("triton_rates"),
    ),
)


def architecture() -> str | None:
    """As nvcc calls it: "90a"; None without a GPU."""
    code = "import torch; print(*torch.cuda.get_device_capability(), sep='')"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True
    )
    number = done.stdout.strip()
    if done.returncode != 0 or not number.isdigit():
        return None
    return number + "a" if int(number) >= 90 else number


def run_part(part: Part, limit_s: float, environment: dict[str, str]) -> dict[str, Any]:
    """What came of it: status (ok, failed, timed out, skipped), seconds, and what it has measured."""
    if part.needs and shutil.which(part.needs) is None:
        return {"status": "skipped", "reason": f"{part.needs} is not in PATH"}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        log = Path(folder) / "log"
        command = [word.replace("{result}", str(result)) for word in part.command]
        with log.open("w") as stream:
            # A session of its own, so that its ranks end with it.
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
                status = "ok" if code == 0 else "failed"
            except subprocess.TimeoutExpired:
                code, status = None, "timed out"
            finally:
                _end_session(process)
        outcome: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - begin, 2)}
        if result.is_file():
            outcome |= _found(result)
        if status != "ok":
            outcome |= {"status": status, "exit_status": code, "limit_s": limit_s}
            outcome["tail"] = log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARACTERS:]
    return outcome


def _found(result: Path) -> dict[str, Any]:
    """What a part has written; it may have been ended in the middle of it."""
    try:
        found = json.loads(result.read_text(encoding="utf-8"))
    except ValueError as error:
        return {"unreadable": str(error)}
    return (
        found if isinstance(found, dict) else {"unreadable": f"{type(found).__name__}, not a dict"}
    )


def _end_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write(path: Path, whole: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def run(parts: Sequence[Part], output: Path, environment: dict[str, str], total_s: float) -> bool:
    """Runs the parts, in order, while there is time. Whether none has failed."""
    end = time.monotonic() + total_s
    whole: dict[str, Any] = {"format": 1, "parts": {}}
    for part in parts:
        limit = min(part.limit_s, end - time.monotonic())
        if limit < 1:
            outcome: dict[str, Any] = {"status": "skipped", "reason": "no time was left"}
        else:
            outcome = run_part(part, limit, environment)
        whole["parts"][part.name] = {"what": part.what, **outcome}
        write(output, whole)
        print(f"{part.name}: {outcome['status']}, {outcome.get('seconds', 0)} s", flush=True)
    return all(o["status"] in ("ok", "skipped") for o in whole["parts"].values())


def chosen_parts(only: str | None, simulates: bool) -> list[Part]:
    """Raises ValueError for names that are no part's, or no part's that runs here."""
    names = None if only is None else [name.strip() for name in only.split(",")]
    possible = list(PARTS)
    if simulates:
        possible = [replace(p, limit_s=SIMULATED_LIMIT_S) for p in PARTS if p.simulated]
    if names is None:
        return possible
    if unknown := [name for name in names if name not in {p.name for p in PARTS}]:
        known = ", ".join(p.name for p in PARTS)
        raise ValueError(f"--only names {unknown[0]!r}, which is no part; the parts are {known}")
    if refused := [name for name in names if name not in {p.name for p in possible}]:
        known = ", ".join(p.name for p in possible)
        raise ValueError(
            f"--only names {refused[0]}, which needs a GPU; the simulator runs {known}"
        )
    return [p for p in possible if p.name in names]


def check_writable(path: Path) -> None:
    """Raises ValueError: minutes of measurements would be lost in the end."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
    except OSError as error:
        raise ValueError(
            f"--output {path} cannot be written ({error.strerror}); name another file"
        ) from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="parts, separated by commas")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--simulate", action="store_true", help="on a CPU, what it can do")
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds for everything")
    arguments = parser.parse_args()
    try:
        parts = chosen_parts(arguments.only, arguments.simulate)
        if not arguments.total > 0:
            raise ValueError(f"--total is {arguments.total:g}; give seconds above 0")
    except ValueError as error:
        parser.error(str(error))
    arch = None if arguments.simulate else architecture()
    if not arguments.simulate and arch is None:
        for part in parts:
            print(f"{part.name}: {part.what} (at most {part.limit_s:.0f} s)")
        print("skipped: torch sees no GPU here")
        return 0
    try:
        check_writable(arguments.output)
    except ValueError as error:
        parser.error(str(error))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    environment["PYCOLL_GPU_CHECK_SIMULATE"] = "1" if arguments.simulate else ""
    if arch is not None:
        environment["PYCOLL_CUDA_ARCHS"] = arch
    return 0 if run(parts, arguments.output, environment, arguments.total) else 1


if __name__ == "__main__":
    sys.exit(main())
