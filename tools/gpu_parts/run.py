"""Runs one part of tools/gpu_check.py: python run.py FUNCTION RESULT [ARGUMENT …]; what it returns becomes JSON.

A part that has found something wrong raises after it has written what it knows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# Cases of Triton kernels, and their checks, are those of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import correctness
import measure
import operators
import rivals
import triton_rates
import triton_values
import wrappers

FUNCTIONS = {
    "streams": correctness.streams,
    "processes": correctness.processes,
    "operators": operators.operators,
    "wrappers": wrappers.wrappers,
    "buckets": measure.buckets,
    "all_reduce": measure.all_reduce,
    "latency": measure.latency,
    "symm_mem": rivals.symm_mem,
    "nccl": rivals.nccl,
    "triton_values": triton_values.values,
    "triton_rates": triton_rates.rates,
}


def main() -> int:
    function, result, *arguments = sys.argv[1:]
    found = FUNCTIONS[function](*arguments)
    Path(result).write_text(json.dumps(found), encoding="utf-8")
    wrong = found.get("wrong", [])
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
