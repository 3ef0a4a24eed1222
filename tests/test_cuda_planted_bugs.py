"""Whether the checks of the CUDA kernels find what they are there to find: one bug at a time is
planted in a copy of the kernels, and each layer that is named with it must catch it.

Layers: "values" (random interleavings, results compared, deadlocks), "weak" (weak memory and its
race detector), "thread" (ThreadSanitizer), "spin" (the models, which read sizes from the code). By
default a sample, one layer a bug; PYCOLL_TEST_FULL=1 tries all.
"""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path

import cuda_sim_programs
import pytest
from spin_models import check, models_of_the_code

ROOT = cuda_sim_programs.ROOT
KERNELS = "csrc/kernels/cuda"


@dataclass(frozen=True)
class Bug:
    name: str
    path: str  # in csrc/kernels/cuda
    original: str
    planted: str
    # A test of test_protocols, or, of the layer "spin", a model.
    caught_by: dict[str, str]


# Left to the full run: their likes are in the sample.
ONLY_IN_FULL = {
    "a ring's tail is stored relaxed",
    "a direct kernel uses one of its slots only",
    "chunks are swapped",
    "ranks are added from the last one on",
    "two-shot does not wait for results",
    "MIN loses NaN",
    "scales are rounded to the nearest",
    "integers lose their sum on the way to an average",
}

BUGS = [
    Bug(
        "a direct kernel posts before its other threads have written",
        "direct.cuh",
        "IsWanted is_wanted) const {\n    block_.sync();",
        "IsWanted is_wanted) const {",
        {"weak": "two_shot", "values": "two_shot", "thread": "two_shot"},
    ),
    Bug(
        "a direct kernel's signal is stored relaxed",
        "direct.cuh",
        "peer::store_release(signal(",
        "peer::store_relaxed(signal(",
        {"weak": "all_gather_direct", "thread": "all_gather_direct"},
    ),
    Bug(
        "signals are loaded relaxed",
        "signals.cuh",
        "const Word seen = peer::load_acquire(signal);",
        "const Word seen = peer::load_relaxed(signal);",
        {"weak": "reduce_scatter_direct", "thread": "reduce_scatter_direct"},
    ),
    Bug(
        "a ring's credit is stored relaxed",
        "ring_simple.cuh",
        "peer::store_release(head_of_previous_",
        "peer::store_relaxed(head_of_previous_",
        {"weak": "all_reduce_ring_simple", "thread": "all_reduce_ring_simple"},
    ),
    Bug(
        "a ring's tail is stored relaxed",
        "ring_simple.cuh",
        "peer::store_release(tail_of_next_",
        "peer::store_relaxed(tail_of_next_",
        {"weak": "reduce_scatter_ring_simple", "thread": "reduce_scatter_ring_simple"},
    ),
    Bug(
        "a direct kernel has a single slot",
        "launch.h",
        "kDirectAreas = 2",
        "kDirectAreas = 1",
        {"spin": "cuda_direct"},
    ),
    Bug(
        "a direct kernel uses one of its slots only",
        "reduce_scatter_direct.cuh",
        "static_cast<int>(j % kDirectAreas)",
        "static_cast<int>(j * 0)",
        {"weak": "reduce_scatter_direct", "values": "reduce_scatter_direct"},
    ),
    Bug(
        "a ring has a single slot",
        "launch.h",
        "kRingSlots = 4",
        "kRingSlots = 1",
        {"spin": "cuda_ring"},
    ),
    Bug(
        "packets of both parities share a place",
        "ll.cuh",
        "(epoch % 2 * static_cast<size_t>(world_size)",
        "(epoch % 1 * static_cast<size_t>(world_size)",
        {"values": "one_shot", "weak": "one_shot", "spin": "cuda_one_shot"},
    ),
    Bug(
        "a step's signal does not hold the epoch",
        "meeting.cuh",
        "return uint64_t{epoch} << 32 | step;",
        "return uint64_t{epoch} * 0 | step;",
        {"values": "all_gather_direct", "weak": "all_reduce_ring_ll128"},
    ),
    Bug(
        "a block sets its own epoch only",
        "meeting.cuh",
        "i < kMaxBlocks;",
        "i < num_blocks();",
        {"values": "two_shot"},
    ),
    Bug(
        "the tail of the data is dropped",
        "edges.cuh",
        "return nbytes == 0 ? 0 : ceil_div(lead + nbytes, kUnitBytes);",
        "return (lead + nbytes) / kUnitBytes;",
        {"values": "one_shot"},
    ),
    Bug(
        "the first unit is moved whole although data begins in it",
        "edges.cuh",
        "return unit < end_vectors_ && (unit > 0 || begin_ == 0);",
        "return unit < end_vectors_;",
        {"values": "misaligned_alike"},
    ),
    Bug(
        "chunks are swapped",
        "all_gather_ring.cuh",
        "ring::all_gather_chunk(args.group.rank, step, n)",
        "ring::all_gather_chunk(args.group.rank, (step + 1) % n, n)",
        {"values": "all_gather_ring_simple"},
    ),
    Bug(
        "one flag a packet is looked at",
        "ll.cuh",
        "return packet.word[1] == flag && packet.word[3] == flag;",
        "return packet.word[3] == flag;",
        {"values": "one_shot", "weak": "one_shot"},
    ),
    Bug(
        "a line is stored in parts",
        "ring_ll128.cuh",
        "peer::store_line(at,",
        "peer::store_two_atoms(at,",
        {"values": "all_reduce_ring_ll128", "weak": "all_reduce_ring_ll128"},
    ),
    Bug(
        "a ring writes a slot one step early",
        "ring_simple.cuh",
        "num_sent - kRingSlots + 1",
        "num_sent - kRingSlots",
        {"weak": "all_reduce_ring_simple", "spin": "cuda_ring"},
    ),
    Bug(
        "a ring signals before all threads have read and written",
        "ring_simple.cuh",
        "block_.sync();\n    num_sent_ += sends;",
        "num_sent_ += sends;",
        {"weak": "all_gather_ring_simple", "thread": "all_gather_ring_simple"},
    ),
    Bug(
        "two-shot does not wait for results",
        "all_reduce_two_shot.cuh",
        "if (!lanes.wait(kOut, done, Phase::kDirectOut, Everybody{})) return false;",
        "",
        {"values": "two_shot", "weak": "two_shot", "spin": "cuda_two_shot"},
    ),
    Bug(
        "the meeting waits for nobody",
        "meeting.cuh",
        "if (!wait_reached(&from->epoch, epoch_, Phase::kMeeting, src, group_.watch)) return false;",
        "",
        {"values": "two_shot"},
    ),
    Bug(
        "MIN loses NaN",
        "elements.cuh",
        "return b < a || b != b ? b : a;",
        "return b < a ? b : a;",
        {"values": "one_shot"},
    ),
    Bug(
        "ranks are added from the last one on",
        "reduce_scatter_direct.cuh",
        "for (int rank = 0; rank < args.group.world_size; ++rank) {",
        "for (int rank = args.group.world_size - 1; rank >= 0; --rank) {",
        {"values": "reduce_scatter_direct"},
    ),
    Bug(
        "a block's scale is that of a part of it",
        "quantised_wire.cuh",
        "if (other > amax) amax = other;",
        "if (other < amax) amax = other;",
        {"values": "quantised_two_shot"},
    ),
    Bug(
        "scales are rounded to the nearest",
        "block_scale.cuh",
        "quotient_toward_zero(",
        "rounded_quotient(",
        {"values": "quantised_all_gather"},
    ),
    Bug(
        "integers lose their sum on the way to an average",
        "ring.cuh",
        "return kIsExact && reduction.op != ReduceOp::kAvg;",
        "return kIsExact;",
        {"values": "integers_on_a_ring"},
    ),
    Bug(
        "a barrier does not meet a rank behind a missing one",
        "meeting.cuh",
        "return rank < group.world_size && rank != group.rank && memory.of_rank[rank] != nullptr;",
        "return rank < group.world_size && rank != group.rank && memory.of_rank[rank] != nullptr &&\n"
        "         (rank == 0 || memory.of_rank[rank - 1] != nullptr);",
        {"values": "barrier_without", "weak": "barrier_without"},
    ),
]

CASES = [
    pytest.param(
        bug,
        layer,
        id=f"{layer}: {bug.name}",
        marks=[
            pytest.mark.slow,
            *([pytest.mark.full] if i > 0 or bug.name in ONLY_IN_FULL else []),
        ],
    )
    for bug in BUGS
    for i, layer in enumerate(bug.caught_by)
]
EVIDENCE = {
    "values": ("is wrong", " instead of ", "wrote beside", "deadlock", "bad access", "step limit"),
    "weak": ("race: ", "is wrong", " instead of ", "deadlock"),
    "thread": ("ThreadSanitizer: data race",),
}
SETTINGS = {
    "values": {"PYCOLL_SIM_MEMORY": "strong", "PYCOLL_SIM_SEEDS": "40"},
    "weak": {"PYCOLL_SIM_MEMORY": "weak", "PYCOLL_SIM_SEEDS": "40"},
    "thread": {"PYCOLL_SIM_SEEDS": "4"},
}


def sanitizer_of(layer: str) -> str:
    return "thread" if layer == "thread" else "none"


def plant(bug: Bug, root: Path) -> None:
    path = root / KERNELS / bug.path
    text = path.read_text(encoding="utf-8")
    count = text.count(bug.original)
    assert count == 1, f"{bug.original!r} is {count} times in {bug.path}: adapt this test"
    path.write_text(text.replace(bug.original, bug.planted), encoding="utf-8")


@functools.cache
def check_unplanted(layer: str, test: str) -> None:
    """Without the bug the same test passes; this also builds what all copies have in common."""
    sanitizer = sanitizer_of(layer)
    cuda_sim_programs.build(sanitizer, ["test_protocols"])
    outcome = cuda_sim_programs.run(sanitizer, "test_protocols", test, variables=SETTINGS[layer])
    assert outcome.passed, f"fails without a bug:\n{outcome.output[-5000:]}"
    assert outcome.num_checks > 0, outcome.output


@pytest.mark.parametrize(("bug", "layer"), CASES)
def test_bug_is_caught(bug: Bug, layer: str, tmp_path: Path) -> None:
    what = bug.caught_by[layer]
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    plant(bug, tmp_path)
    if layer == "spin":
        if shutil.which("spin") is None:
            cuda_sim_programs.missing("spin is not installed")
        assert check(models_of_the_code()[what]).error == "", "fails without a bug"
        assert check(models_of_the_code(tmp_path)[what], error_expected=True).error != ""
        return
    check_unplanted(layer, what)
    sanitizer = sanitizer_of(layer)
    build_folder = tmp_path / "build"
    cuda_sim_programs.share_objects(sanitizer, build_folder)
    variables = {"BUILD": str(build_folder), "CSRC": str(tmp_path / "csrc")}
    cuda_sim_programs.build(sanitizer, ["test_protocols"], variables)
    outcome = cuda_sim_programs.run(
        sanitizer, "test_protocols", what, build_folder=build_folder, variables=SETTINGS[layer]
    )
    shutil.rmtree(build_folder)  # pytest keeps the folder
    assert not outcome.passed, f"{layer} does not see that {bug.name}"
    assert any(text in outcome.output for text in EVIDENCE[layer]), outcome.output[-5000:]


def test_the_sample_has_bugs_enough() -> None:
    names = {bug.name for bug in BUGS}
    assert names > ONLY_IN_FULL
    assert len(names - ONLY_IN_FULL) >= 12


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_can_be_planted(bug: Bug, tmp_path: Path) -> None:
    path = tmp_path / KERNELS / bug.path
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT / KERNELS / bug.path, path)
    plant(bug, tmp_path)
