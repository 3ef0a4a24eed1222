"""What Triton's compiler makes of the kernels, for each generation of GPUs: no GPU is needed.

sm_90 is compiled for the simulator as well (test_triton_ptx.py); by default the others get one kernel of each kind.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from test_triton_ptx import case_file
from triton_cases import CASES
from triton_compiler import Specification, compile_all

FULL = os.environ.get("PYCOLL_TEST_FULL") == "1"
ARCHS = (80, 90, 100)
# Cases whose tensors are aligned: their loops move 16 bytes at once.
ALIGNED = (
    *("one_shot", "two_shot", "ring", "two_shot_bfloat16", "two_shot_float8_max"),
    *("reduce_scatter_aligned", "all_gather_aligned", "flatten", "quantise"),
)
SAMPLE = (
    "one_shot",
    "two_shot_bfloat16",
    "ring",
    "reduce_scatter_aligned",
    "all_gather_aligned",
    "flatten",
)
VECTOR_BYTES = 16
TABLE_BYTES = 8  # addresses and sizes come from tables


def specifications_of(names: tuple[str, ...]) -> dict[str, Specification]:
    found: dict[str, Specification] = {}
    for name in names:
        found |= case_file(name)[1]
    return found


@dataclass(frozen=True)
class Access:
    kind: str
    nbytes: int


def accesses_of(text: str) -> list[Access]:
    """Plain ones to global memory."""
    found = []
    for kind, many, bits in re.findall(r"\b(ld|st)\.global(?:\.v(\d))?\.[bufs](\d+)\b", text):
        found.append(Access(kind, int(many or 1) * int(bits) // 8))
    return found


def innermost_loops(ptx: str) -> list[str]:
    """Their instructions: from a label to the branch back to it, with no such pair in between."""
    places = {
        name: at.start() for at in re.finditer(r"^(\$L\w+):", ptx, re.MULTILINE) for name in [at[1]]
    }
    loops = []
    for branch in re.finditer(r"\bbra(?:\.uni)?\s+(\$L\w+)", ptx):
        if places[branch[1]] < branch.start():
            loops.append((places[branch[1]], branch.start()))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [ptx[begin:end] for begin, end in inner]


def narrow_accesses(ptx: str) -> list[Access]:
    """Below 16 bytes, but for tables, in loops that move vectors."""
    narrow = []
    for loop in innermost_loops(ptx):
        accesses = accesses_of(loop)
        if any(access.nbytes >= VECTOR_BYTES for access in accesses):
            narrow += [
                it for it in accesses if it.nbytes < VECTOR_BYTES and it.nbytes != TABLE_BYTES
            ]
    return narrow


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile(arch: int, tmp_path: Path) -> None:
    names = tuple(CASES) if FULL else SAMPLE
    specifications = specifications_of(names)
    compile_all(specifications, arch, tmp_path)
    for name in specifications:
        ptx = (tmp_path / f"{name}.ptx").read_text(encoding="utf-8")
        assert re.search(rf"\.target sm_{arch}a?\b", ptx), name
        assert (tmp_path / f"{name}.cubin").read_bytes()[:4] == b"\x7fELF", name
        # Every signal has system scope.
        assert not re.search(r"\.(gpu|cta)\.(acquire|release|acq_rel)", ptx), name
        assert json.loads((tmp_path / f"{name}.json").read_text())["shared"] < 48 << 10, name
    for name, what in specifications_of(tuple(set(names) & set(ALIGNED))).items():
        if dict(what.constants)["UNIT"] == 1:  # the last block of a quantised tensor
            continue
        ptx = (tmp_path / f"{name}.ptx").read_text(encoding="utf-8")
        loops = innermost_loops(ptx)
        widest = {
            kind: max(
                (a.nbytes for loop in loops for a in accesses_of(loop) if a.kind == kind), default=0
            )
            for kind in ("ld", "st")
        }
        assert min(widest.values()) >= VECTOR_BYTES, (name, widest)
        assert not narrow_accesses(ptx), (name, narrow_accesses(ptx))


def test_narrow_accesses_are_found() -> None:
    ptx = """
$L__BB0_1:
    ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    st.global.b16 [ %rd2 + 0 ], { %rs1 };
    ld.global.b64 { %rd3 }, [ %rd4 + 0 ];
    @%p1 bra $L__BB0_1;
    st.global.b8 [ %rd2 + 0 ], { %rs1 };
"""
    assert narrow_accesses(ptx) == [Access("st", 2)]
