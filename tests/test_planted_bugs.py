"""Whether the tests of the core find what they are there to find: one bug at a time is planted in a
copy, and the layer that is named with it must catch it.

Layers: "values" (the plain programs), "thread" and "address" (the same with sanitizers), "spin" (the
models, which read sizes and memory orders from the code). By default a sample; PYCOLL_TEST_FULL=1
plants all.
"""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path

import native_programs
import pytest
from spin_models import check, models_of_the_code

ROOT = native_programs.ROOT


@dataclass(frozen=True)
class Bug:
    name: str
    path: str  # in csrc
    original: str
    planted: str
    # Of each layer that must catch it: the program and some of its tests, or the model.
    caught_by: dict[str, str]


ROUND_TRIP = "test_exchanges every_collective"

BUGS = [
    Bug(
        "the handshake's signal is stored relaxed",
        "collectives/group.cpp",
        "signal.store(sequence, std::memory_order_seq_cst)",
        "signal.store(sequence, std::memory_order_relaxed)",
        {"thread": ROUND_TRIP, "spin": "bell"},
    ),
    Bug(
        "the round is stored relaxed",
        "collectives/group.cpp",
        "round.store(++rounds_posted_, std::memory_order_seq_cst)",
        "round.store(++rounds_posted_, std::memory_order_relaxed)",
        {"thread": ROUND_TRIP},
    ),
    Bug(
        "a lane's tail is stored relaxed",
        "lane/shared_lane.cpp",
        "tail.store(++tail_, std::memory_order_seq_cst)",
        "tail.store(++tail_, std::memory_order_relaxed)",
        {"thread": "test_messages every_size"},
    ),
    Bug(
        "a lane's head is stored relaxed",
        "lane/shared_lane.cpp",
        "head.store(++head_, std::memory_order_seq_cst)",
        "head.store(++head_, std::memory_order_relaxed)",
        {"thread": "test_messages many_in_flight both_sides"},
    ),
    Bug(
        "an exchange has two slots instead of four",
        "collectives/staged_exchange.h",
        "kSlots = 4",
        "kSlots = 2",
        {"values": ROUND_TRIP, "thread": ROUND_TRIP, "spin": "one_exchange"},
    ),
    Bug(
        "two shots have one slot instead of three",
        "collectives/two_shot.h",
        "kSlots = 3",
        "kSlots = 1",
        {"values": ROUND_TRIP, "thread": ROUND_TRIP, "spin": "two_shot"},
    ),
    # What the next three do to wake-ups and lanes is too rare, or only slow, for tests that run the code.
    Bug(
        "rounds have two arrival counters instead of four",
        "memory/group_page.h",
        "kRoundCounters = 4",
        "kRoundCounters = 2",
        {"spin": "one_exchange"},
    ),
    Bug(
        "handshakes have one slot",
        "memory/group_page.h",
        "(sequence % 2) * slot_bytes(payload_bytes)",
        "(sequence % 1) * slot_bytes(payload_bytes)",
        {"spin": "handshake"},
    ),
    Bug(
        "a lane of collectives has half its slots",
        "collectives/group.cpp",
        "num_slots = 2 * static_cast<size_t>(world_size())",
        "num_slots = 1 * static_cast<size_t>(world_size())",
        {"spin": "ring_pipeline"},
    ),
    Bug(
        "the rest of a division is lost",
        "topology/partition.h",
        "base_ + (index < rest_ ? 1 : 0)",
        "base_",
        {"values": "test_topology parts"},
    ),
    Bug(
        "the ring hands out the wrong chunks",
        "topology/ring.h",
        "(rank + world_size - step) % world_size",
        "(rank + step) % world_size",
        {"values": "test_topology all_gather"},
    ),
    Bug(
        "the ring puts a chunk where another belongs",
        "collectives/all_reduce/ring.cpp",
        "request.output.copy_to_chunk(item.received, 0, begin,",
        "request.output.copy_to_chunk(item.received, 0, begin == 0 ? 1 : begin,",
        {"values": ROUND_TRIP},
    ),
    Bug(
        "a rank that refuses does not wait",
        "engine/collective_queue.cpp",
        "  group.post_handshake(context.sequence);\n",
        "  group.post_handshake(context.sequence);\n  if (refused) co_return;\n",
        {"values": "test_engine each_refusal"},
    ),
    Bug(
        "a sleeper looks before it announces itself",
        "sync/bell.h",
        "    sleepers.fetch_add(1, std::memory_order_seq_cst);\n    if (!arrived())",
        "    const bool there = arrived();\n"
        "    sleepers.fetch_add(1, std::memory_order_seq_cst);\n    if (!there)",
        {"values": "test_progress_engine sleeper"},
    ),
    Bug(
        "a reduction writes one element too many",
        "kernels/cpu/reduce.cpp",
        "std::min(most, args.numel - begin)",
        "std::min(most, args.numel - begin + 1)",
        {"values": "test_kernels every_dtype", "address": "test_kernels every_dtype"},
    ),
    Bug(
        "bfloat16 is cut instead of rounded",
        "kernels/cpu/float_formats.inl",
        "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16",
        "bits >> 16",
        {"values": "test_conversions narrowing_rounds"},
    ),
    Bug(
        "a maximum loses a NaN in its second operand",
        "kernels/cpu/tile_kernels.inl",
        "((b > a) | (b != b))",
        "(b > a)",
        {"values": "test_kernels min_and_max"},
    ),
    Bug(
        "codes are cut instead of rounded",
        "kernels/cpu/float_formats.inl",
        "const u32 normal = (number - (static_cast<u32>(127 - kBias) << 23) + half)",
        "const u32 normal = (number - (static_cast<u32>(127 - kBias) << 23) + half * 0)",
        {"values": "test_quantise alike"},
    ),
    Bug(
        "a scale is rounded to nearest",
        "kernels/cpu/block_quantise.cpp",
        "std::bit_cast<uint32_t>(scale) - 1",
        "std::bit_cast<uint32_t>(scale) - 0",
        {"values": "test_quantise a_scale"},
    ),
    Bug(
        "what a bucket lacks stays as it was",
        "kernels/cpu/bucket.cpp",
        "else if (!accumulate)",
        "else if (!accumulate && factor != 1.0)",
        {"values": "test_bucket thousands"},
    ),
    Bug(
        "the result of one shot is not encoded",
        "collectives/reduction.cpp",
        "else if (request.collective == Collective::kAllReduce)",
        "else if (request.collective == Collective::kReduce)",
        {"values": "test_wire every_collective"},
    ),
    Bug(
        "a rank's own contribution is not encoded",
        "collectives/two_shot.cpp",
        "(r == me_ && !request_.wire)",
        "(r == me_)",
        {"values": "test_wire many_blocks"},
    ),
    Bug(
        "ranks do not compare wire formats",
        "engine/fingerprint.cpp",
        "pack(call.wire) << 48",
        "pack(call.wire) << 48 << 16",
        {"values": "test_wire formats_are_compared"},
    ),
    Bug(
        "staging is given back while peers read it",
        "memory/arena.cpp",
        "if (pending.unused())",
        "if (pending.unused() || true)",
        {"values": "test_memory arena_"},
    ),
    Bug(
        "broadcast's root does not wait for its readers",
        "collectives/broadcast/direct.cpp",
        "block >= kSlots && r < context.world_size()",
        "block >= 100 * kSlots && r < context.world_size()",
        {"values": "test_exchanges same_collective"},
    ),
    Bug(
        "who has done its part does not wait for those that still read its tensor",
        "collectives/peer_tensors.cpp",
        "if (r != context.rank()) co_await context.reached(context.group.round(r, last));",
        "if (r < 0) co_await context.reached(context.group.round(r, last));",
        {"thread": "test_exchanges mapped_tensors", "values": "test_exchanges mapped_tensors"},
    ),
    Bug(
        "the result is written to this rank's output only",
        "kernels/cpu/reduce.cpp",
        "i < args.num_copies",
        "i < args.num_copies - 1",
        {"values": "test_exchanges mapped_tensors"},
    ),
    Bug(
        "parts of a tensor overlap",
        "collectives/direct_reduction.cpp",
        "std::min(numel, (units.begin + units.numel) * kUnit) - begin}",
        "std::min(numel, (units.begin + units.numel + 1) * kUnit) - begin}",
        {"values": "test_exchanges mapped_tensors", "thread": "test_exchanges mapped_tensors"},
    ),
    Bug(
        "who gives up does not wait for those that touch its tensor",
        "engine/collective_queue.cpp",
        "Deadline::after(kTouchingPatience)",
        "Deadline::after(0 * kTouchingPatience)",
        {"values": "test_direct gives_up"},
    ),
    Bug(
        "who touches does not look whether others have given up",
        "collectives/group.cpp",
        "  try {\n    group_.check_all_open();",
        "  try {\n    if (group_.world_size() > 99) group_.check_all_open();",
        {"values": "test_direct after_a_member"},
    ),
    Bug(
        "freed memory is not given back",
        "memory/shared_heap.cpp",
        "    segment_->give_back(offset, bytes);",
        "    (void)offset;",
        {"values": "test_shared_heap goes_back"},
    ),
    Bug(
        "all parts of a long message land at its beginning",
        "engine/message_queue.cpp",
        "std::memcpy(receive->data + header.offset, payload, header.length)",
        "std::memcpy(receive->data, payload, header.length)",
        {"values": "test_messages every_size"},
    ),
]
SAMPLE = {
    ("the handshake's signal is stored relaxed", "thread"),
    ("an exchange has two slots instead of four", "spin"),
    ("a rank that refuses does not wait", "values"),
    ("a reduction writes one element too many", "address"),
}
CASES = [
    pytest.param(
        bug,
        layer,
        id=f"{layer}-{bug.name}",
        marks=[pytest.mark.slow, *([] if (bug.name, layer) in SAMPLE else [pytest.mark.full])],
    )
    for bug in BUGS
    for layer in bug.caught_by
]

EVIDENCE = {
    "values": "FAIL ",
    "thread": "WARNING: ThreadSanitizer: data race",
    "address": "ERROR: AddressSanitizer",
}
SANITIZER = {"values": "none", "thread": "thread", "address": "address"}
# What hangs because of a bug is caught as well, but need not take long.
MOST_SECONDS = 60


def plant(bug: Bug, root: Path) -> None:
    path = root / "csrc" / bug.path
    text = path.read_text(encoding="utf-8")
    count = text.count(bug.original)
    assert count == 1, f"{bug.original!r} is {count} times in {bug.path}: adapt this test"
    path.write_text(text.replace(bug.original, bug.planted), encoding="utf-8")


@functools.cache
def check_unplanted(sanitizer: str, program: str, *tests: str) -> None:
    """Without the bug the same tests pass; this also builds what all copies have in common."""
    native_programs.build(sanitizer, [program])
    outcome = native_programs.run(sanitizer, program, *tests)
    assert outcome.passed, f"fails without a bug:\n{outcome.output[-5000:]}"
    assert outcome.num_checks > 0, outcome.output


def copy_tree(target: Path, sanitizer: str) -> None:
    """csrc and tests/native with the objects of one sanitizer, times included: make goes on from there."""
    shutil.copytree(ROOT / "csrc", target / "csrc")
    native = target / "tests/native"
    shutil.copytree(ROOT / "tests/native", native, ignore=shutil.ignore_patterns("build"))
    shutil.copytree(
        ROOT / "tests/native/build" / sanitizer,
        native / "build" / sanitizer,
        ignore=lambda folder, names: [
            name for name in names if name.startswith("test_") and "." not in name
        ],
    )


@pytest.mark.parametrize(("bug", "layer"), CASES)
def test_bug_is_caught(bug: Bug, layer: str, tmp_path: Path) -> None:
    what = bug.caught_by[layer].split()
    if layer == "spin":
        if shutil.which("spin") is None:
            native_programs.missing("spin is not installed")
        shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
        plant(bug, tmp_path)
        assert check(models_of_the_code()[what[0]]).error == "", "fails without a bug"
        assert check(models_of_the_code(tmp_path)[what[0]], error_expected=True).error != ""
        return
    sanitizer = SANITIZER[layer]
    check_unplanted(sanitizer, *what)
    copy_tree(tmp_path, sanitizer)
    plant(bug, tmp_path)
    native_programs.build(sanitizer, what[:1], root=tmp_path)
    outcome = native_programs.run(sanitizer, *what, root=tmp_path, timeout_s=MOST_SECONDS)
    assert not outcome.passed, f"{layer} does not see that {bug.name}"
    hangs = "did not end within" in outcome.output
    assert EVIDENCE[layer] in outcome.output or hangs, outcome.output[-5000:]
    shutil.rmtree(tmp_path / "tests", ignore_errors=True)  # pytest keeps the folder, which is large


def test_each_bug_of_the_sample_exists() -> None:
    assert {(bug.name, layer) for bug in BUGS for layer in bug.caught_by} >= SAMPLE


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_can_be_planted(bug: Bug, tmp_path: Path) -> None:
    path = tmp_path / "csrc" / bug.path
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT / "csrc" / bug.path, path)
    plant(bug, tmp_path)
