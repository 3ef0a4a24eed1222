"""Runs the models of tests/spin with what the code says about sizes and memory orders.

A model is a Promela program; macros set its sizes and select its broken variants. `spin -a` makes a
C program of it that looks at every state that can be reached.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests/spin"
MOST_MEMORY_MB = 3000
MOST_DEPTH = 200_000

Macros = dict[str, int | None]


@dataclass(frozen=True)
class Model:
    """One model with all its sizes; a macro without a value is a switch."""

    name: str
    macros: Macros = field(default_factory=dict)

    def __str__(self) -> str:
        flags = (k if v is None else f"{k}={v}" for k, v in self.macros.items())
        return "-".join([self.name, *flags])


@dataclass(frozen=True)
class Verdict:
    error: str  # "": none was found
    complete: bool  # every state was looked at
    states: float
    output: str


def check(model: Model, timeout_s: float = 60, *, error_expected: bool = False) -> Verdict:
    """Searches all states of `model`, or up to the first error."""
    with tempfile.TemporaryDirectory(prefix="pycoll-spin-") as name:
        folder = Path(name)
        for source in (*FOLDER.glob("*.inc"), FOLDER / f"{model.name}.pml"):
            shutil.copy(source, folder)
        defines = [f"-D{k}" if v is None else f"-D{k}={v}" for k, v in model.macros.items()]
        _run(["spin", "-a", *defines, f"{model.name}.pml"], folder)
        # A search that is expected to end early is not worth the optimising.
        compile_flags = [
            "-O0" if error_expected else "-O1",
            "-w",
            "-DSAFETY",
            "-DCOLLAPSE",
            f"-DMEMLIM={MOST_MEMORY_MB}",
        ]
        _run(["gcc", *compile_flags, "-o", "pan", "pan.c"], folder)
        output = _run(["./pan", f"-m{MOST_DEPTH}", "-w22"], folder, timeout_s)
    errors = re.search(r"errors: (\d+)", output)
    assert errors, output
    found = re.search(r"^pan:\d+: (.*?) \(at depth", output, re.MULTILINE)
    states = re.search(r"([\d.e+]+) states, stored", output)
    cut_short = "Search not completed" in output or "search depth too small" in output
    return Verdict(
        error=found[1] if found and errors[1] != "0" else "",
        complete="Full statespace search" in output and not cut_short,
        states=float(states[1]) if states else 0,
        output=output,
    )


def _run(command: list[str], folder: Path, timeout_s: float = 60) -> str:
    # pan's exit status does not tell whether it found an error.
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)}:\n{output}"
    return output


# --- what the code says ---------------------------------------------------------------------------

# Every store that a sleeper may be waiting for. bell.pml shows that a weaker one loses wake-ups.
POSTS = {
    "a handshake": ("collectives/group.cpp", r"signal\.store\(sequence, (\S+)\)"),
    "a round": ("collectives/group.cpp", r"round\.store\(\+\+rounds_posted_, (\S+)\)"),
    "a group's state": (
        "collectives/group.cpp",
        r"state\.store\(static_cast<uint32_t>\(GroupState::kPoisoned\), (\S+)\)",
    ),
    "a lane's tail": ("lane/shared_lane.cpp", r"tail\.store\(\+\+tail_, (\S+)\)"),
    "a lane's head": ("lane/shared_lane.cpp", r"head\.store\(\+\+head_, (\S+)\)"),
    "the end of an operation": ("engine/operation.h", r"finished_\.store\(true, (\S+)\)"),
    "news for the progress engine": (
        "engine/progress_engine.cpp",
        r"active_\.push_back.*?news_\.store\(true, (\S+)\)",
    ),
}


def _find(root: Path, path: str, pattern: str) -> str:
    text = (root / "csrc" / path).read_text(encoding="utf-8")
    matches = re.findall(pattern, text, re.DOTALL)
    assert len(matches) == 1, f"{pattern} is {len(matches)} times in {path}: adapt this file"
    return matches[0]


def weak_posts(root: Path = ROOT) -> list[str]:
    """The posts whose store is not sequentially consistent."""
    orders = {what: _find(root, *where) for what, where in POSTS.items()}
    return [what for what, order in orders.items() if order != "std::memory_order_seq_cst"]


def models_of_the_code(root: Path = ROOT) -> dict[str, Model]:
    """Each model with the sizes that `root`/csrc has."""

    def number(path: str, pattern: str) -> int:
        return int(_find(root, path, pattern))

    slots = r"\bkSlots = (\d+)"
    page = "memory/group_page.h"
    rounds = number(page, r"kRoundCounters = (\d+)")
    page_text = (root / "csrc" / page).read_text(encoding="utf-8")
    one_handshake_counter = "Counter handshake_arrivals;" in page_text
    two_shot_slots = number("collectives/two_shot.h", slots)
    lanes = number(
        "collectives/group.cpp", r"num_slots = (\d+) \* static_cast<size_t>\(world_size\(\)\)"
    )
    driver_text = (root / "csrc/engine/driver.h").read_text(encoding="utf-8")
    models = {
        "bell": {"RELEASE_POST": None} if weak_posts(root) else {},
        "handshake": {
            "SLOTS": number(page, r"\(sequence % (\d+)\) \* slot_bytes"),
            "COUNTERS": 1 if one_handshake_counter else number(page, r"kHandshakeCounters = (\d+)"),
        },
        "one_exchange": {
            "SLOTS": number("collectives/staged_exchange.h", slots),
            "COUNTERS": rounds,
        },
        "two_shot": {"IN_SLOTS": two_shot_slots, "OUT_SLOTS": two_shot_slots, "COUNTERS": rounds},
        "broadcast": {"SLOTS": number("collectives/broadcast/direct.cpp", slots)},
        "gather": {"SLOTS": number("collectives/gather/direct.cpp", slots)},
        "ring_pipeline": {"N": 3, "SLOTS": 3 * lanes},
        "lane": {},
        "messages": {},
        "touching": {} if _looks_after_it_touches(root) else {"LOOK_FIRST": None},
        "driver": {} if "left_to_waiters" in driver_text else {"FORGOTTEN": None},
    }
    models |= _models_of_the_cuda_kernels(root)
    return {name: Model(name, macros) for name, macros in models.items()}


def _looks_after_it_touches(root: Path) -> bool:
    text = (root / "csrc/collectives/group.cpp").read_text(encoding="utf-8")
    body = text[text.index("Group::Touching::Touching(") : text.index("Group::Touching::~Touching")]
    touches = body.index("touching.store(1, std::memory_order_seq_cst)")
    return touches < body.index("check_all_open()")


def _order_of_shares(root: Path) -> Macros:
    text = (root / "csrc/kernels/cuda/shares.cuh").read_text(encoding="utf-8")
    macros: Macros = {}
    if "meeting.begin(" not in text:
        macros["NO_MEETING"] = None
    if "lanes.wait(" not in text:
        macros["NO_WAIT"] = None
    if text.index("lanes.post(") < text.index(") fn(unit)"):
        macros["POST_EARLY"] = None
    return macros


def _models_of_the_cuda_kernels(root: Path) -> dict[str, Macros]:
    folder = "kernels/cuda"
    launch = f"{folder}/launch.h"
    two_shot = (root / f"csrc/{folder}/all_reduce_two_shot.cuh").read_text(encoding="utf-8")
    waits_out = "lanes.wait(kOut" in two_shot
    ahead = _find(root, f"{folder}/ring_simple.cuh", r"num_sent - kRingSlots( \+ 1|)\)")
    return {
        "cuda_meeting": {
            "PARITIES": int(_find(root, f"{folder}/meeting.cuh", r"epoch_ % (\d+) \* static_cast"))
        },
        "cuda_one_shot": {
            "PARITIES": int(_find(root, f"{folder}/ll.cuh", r"\(epoch % (\d+) \* static_cast"))
        },
        "cuda_direct": {"SLOTS": int(_find(root, launch, r"kDirectAreas = (\d+)"))},
        "cuda_two_shot": {} if waits_out else {"NO_WAIT_OUT": None},
        "cuda_mapped": _order_of_shares(root),
        # More ranks than slots, or heads would not matter; and few steps, or it would take a minute.
        "cuda_ring": {
            "N": 5,
            "STEPS": 6,
            "SEGMENTS": 1,
            "SLOTS": int(_find(root, launch, r"kRingSlots = (\d+)")),
            "FREE_AHEAD": 1 if ahead else 0,
        },
    }
