"""Whether the checks of the Triton kernels find what they are there to find: one bug at a time is planted in a copy of
the kernels, or in their PTX, and the layer that is named must catch it (layers: test_triton_ptx.py).

By default a sample, one layer a bug; PYCOLL_TEST_FULL=1 tries all.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import test_triton_ptx
from test_triton_ptx import ARCH, LAYERS, case_file, folder_of
from triton_compiler import ROOT
from triton_simulation import Program

KERNELS = "pycoll/triton_kernels"
SEEDS = {"strong": 60, "weak": 40, "thread": 4}


@dataclass(frozen=True)
class Bug:
    name: str
    path: str  # in pycoll/triton_kernels, or "ptx"
    original: str  # of PTX: a pattern
    planted: str
    # The case that catches it, by layer; the first one is in the sample.
    caught_by: dict[str, str]
    triton: str = "installed"
    only_in_full: bool = False


BARRIER = "    tl.debug_barrier()\n    if goes_on:\n        for distance"
BUGS = [
    Bug(
        "a block signals before all its threads have read and written (Triton 3.6)",
        "signals.py",
        BARRIER,
        "    if goes_on:\n        for distance",
        {"weak": "two_shot", "thread": "two_shot", "strong": "two_shot"},
        triton="3.6",
    ),
    Bug(
        "a ring signals before all its threads have read and written (Triton 3.6)",
        "ring.py",
        "    tl.debug_barrier()\n    if goes_on:\n        if sends:",
        "    if goes_on:\n        if sends:",
        {"thread": "ring", "weak": "ring"},
        triton="3.6",
        only_in_full=True,
    ),
    Bug(
        "signals are stored relaxed",
        "ptx",
        r"atom\.global\.sys\.release\.exch\.b64",
        "atom.global.sys.relaxed.exch.b64",
        {"weak": "two_shot", "thread": "one_shot"},
        only_in_full=True,
    ),
    Bug(
        "signals are read relaxed",
        "ptx",
        r"ld\.global\.sys\.acquire\.b64",
        "ld.global.sys.relaxed.b64",
        {"weak": "one_shot", "thread": "two_shot"},
        only_in_full=True,
    ),
    Bug(
        "entries of the meeting are stored relaxed",
        "ptx",
        r"(@%p\d+ )atom\.global\.sys\.release\.exch\.b32 (%r\d+), \[ (%rd\d+) \+ 0 \], (%r\d+);",
        r"\1atom.global.sys.relaxed.exch.b32 \2, [ \3 + 0 ], \4;",
        {"weak": "two_shot"},
        only_in_full=True,
    ),
    Bug(
        "two-shot does not wait for results",
        "all_reduce_two_shot.py",
        "        goes_on = wait_all(group, AREA_OUT, epoch, iteration + 1, PHASE_DIRECT_OUT, goes_on)\n",
        "",
        {"weak": "two_shot", "strong": "two_shot"},
        only_in_full=True,
    ),
    Bug(
        "the meeting waits for nobody",
        "signals.py",
        "    return epoch, meet_all(group, epoch, fingerprint, goes_on)",
        "    return epoch, goes_on",
        {"strong": "mixed"},
        only_in_full=True,
    ),
    Bug(
        "a ring writes a slot one step early",
        "ring.py",
        "num_sent - RING_SLOTS + 1, 0)",
        "num_sent - RING_SLOTS, 0)",
        {"weak": "ring", "thread": "ring"},
        only_in_full=True,
    ),
    Bug(
        "one-shot has one place instead of two",
        "all_reduce_one_shot.py",
        "place = ((epoch & 1) * world_size_of(group) + src)",
        "place = ((epoch & 0) * world_size_of(group) + src)",
        {"weak": "one_shot", "strong": "one_shot"},
    ),
    Bug(
        "reduce_scatter uses one of its slots only",
        "reduce_scatter.py",
        "area = iteration % 2",
        "area = iteration * 0",
        {"weak": "reduce_scatter", "thread": "reduce_scatter"},
        only_in_full=True,
    ),
    Bug(
        "the last elements are dropped",
        "segments.py",
        "    return offsets, offsets < tl.where(first_unit == 0, numel, 0)\n",
        "    return offsets, offsets < tl.where(first_unit == 0, numel - 1, 0)\n",
        {"strong": "one_shot"},
        only_in_full=True,
    ),
    Bug(
        "chunks are swapped",
        "all_gather.py",
        "copy_segment(output + first + begin, slot,",
        "copy_segment(output + tl.load(chunks + rank) + begin, slot,",
        {"strong": "all_gather"},
        only_in_full=True,
    ),
    Bug(
        "ranks are added from the last one on",
        "reduction.py",
        "    for src in range(1, world_size_of(group)):\n",
        "    for index in range(1, world_size_of(group)):\n        src = world_size_of(group) - index\n",
        {"strong": "reduce_scatter"},
        only_in_full=True,
    ),
    Bug(
        "max loses NaN",
        "elements.py",
        "        return tl.where((b > a) | (b != b), b, a), a2\n",
        "        return tl.where(b > a, b, a), a2\n",
        {"strong": "two_shot_float8_max"},
        only_in_full=True,
    ),
    Bug(
        "the epoch is not counted",
        "signals.py",
        "    tl.store(epochs + words, epoch + tl.zeros_like(words), mask=words < end)\n",
        "    tl.store(epochs + words, epoch + tl.zeros_like(words) - 1, mask=words < end)\n",
        {"strong": "two_shot"},
        only_in_full=True,
    ),
    Bug(
        "elements at an edge are stored while other threads load them",
        "reduction.py",
        "    if IS_EDGE:\n        tl.debug_barrier()\n",
        "",
        {"weak": "two_shot", "thread": "one_shot"},
        only_in_full=True,
    ),
    Bug(
        "scales are rounded to the nearest",
        "quantise.py",
        " - is_above.to(tl.int32)",
        "",
        {"strong": "quantise"},
        only_in_full=True,
    ),
]
EVIDENCE = {
    "strong": ("is wrong", "deadlock", "bad access", "step limit"),
    "weak": ("race: ", "is wrong", "deadlock"),
    "thread": ("ThreadSanitizer: data race",),
}
CAUGHT = [
    pytest.param(
        bug,
        layer,
        id=f"{layer}: {bug.name}",
        marks=[
            pytest.mark.slow,
            *([pytest.mark.full] if i > 0 or bug.only_in_full else []),
        ],
    )
    for bug in BUGS
    for i, layer in enumerate(bug.caught_by)
]


def plant(bug: Bug, root: Path) -> None:
    """In a copy of the kernels' package."""
    shutil.copytree(ROOT / "pycoll", root / "pycoll", ignore=shutil.ignore_patterns("*.so"))
    path = root / KERNELS / bug.path
    text = path.read_text(encoding="utf-8")
    count = text.count(bug.original)
    assert count == 1, f"{bug.original!r} is {count} times in {bug.path}: adapt this test"
    path.write_text(text.replace(bug.original, bug.planted), encoding="utf-8")


def planted_program(bug: Bug, name: str, folder: Path) -> Program:
    program = Program(folder / "program")
    specifications = case_file(name)[1]
    triton = folder_of(bug.triton)
    if bug.path != "ptx":
        plant(bug, folder)
        program.compile(specifications, ARCH, triton, folder)
        return program
    program.compile(specifications, ARCH, triton)
    for kernel in specifications:
        path = program.folder / f"{kernel}.ptx"
        text, count = re.subn(bug.original, bug.planted, path.read_text(encoding="utf-8"))
        assert count > 0, f"{bug.original!r} is not in the PTX: adapt this test"
        path.write_text(text, encoding="utf-8")
    return program


@pytest.mark.parametrize(("bug", "layer"), CAUGHT)
def test_bug_is_caught(bug: Bug, layer: str, tmp_path: Path) -> None:
    name, (sanitizer, memory) = bug.caught_by[layer], LAYERS[layer]
    folder_of(bug.triton)  # or skip
    unplanted = test_triton_ptx.run(bug.triton, name, layer, test_triton_ptx.SEEDS[layer])
    assert unplanted.passed, f"fails without a bug:\n{unplanted.output[-3000:]}"
    program = planted_program(bug, name, tmp_path)
    program.build(sanitizer, case_file(name)[1])
    outcome = program.run(case_file(name)[0], sanitizer, memory, SEEDS[layer])
    shutil.rmtree(program.folder)  # pytest keeps the folder
    assert not outcome.passed, f"{layer} does not see that {bug.name}"
    assert any(text in outcome.output for text in EVIDENCE[layer]), outcome.output[-5000:]


@pytest.mark.parametrize(
    "bug", [bug for bug in BUGS if bug.path != "ptx"], ids=lambda bug: bug.name
)
def test_bug_can_be_planted(bug: Bug, tmp_path: Path) -> None:
    plant(bug, tmp_path)
