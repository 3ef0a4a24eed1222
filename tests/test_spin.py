"""The signal protocols as models: every order of steps is tried, in ours and in broken variants.

The models in tests/spin say in comments which part of the code they stand for; sizes are read from
the code, so that a change of the code is a change of the model.
"""

from __future__ import annotations

import os
import shutil

import pytest
from spin_models import FOLDER, Model, check, models_of_the_code, weak_posts

MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]


@pytest.fixture(autouse=True, scope="module")
def tools() -> None:
    if not MISSING:
        return
    reason = f"{' and '.join(MISSING)} not installed (on Debian: apt-get install spin gcc)"
    if os.environ.get("PYCOLL_REQUIRE_TOOLS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


NAMES = sorted(path.stem for path in FOLDER.glob("*.pml"))

# More ranks, more rounds, and sizes at which a protocol is still right.
RIGHT = [
    Model("bell", {"THREADS": 2}),
    Model("bell", {"POSTERS": 3}),
    Model("bell", {"ONLY_LAST_RINGS": None, "ROUNDS": 1, "POSTERS": 3, "THREADS": 2}),
    Model("handshake", {"N": 2, "OPERATIONS": 5}),
    Model("one_exchange", {"N": 2, "BLOCKS": 9}),
    Model("one_exchange", {"COUNTERS": 3}),
    Model("two_shot", {"N": 2, "BLOCKS": 8}),
    Model("two_shot", {"OUT_SLOTS": 2}),
    Model("broadcast", {"SLOTS": 1}),
    Model("gather", {"SLOTS": 1}),
    Model("lane", {"SLOTS": 1}),
    Model("lane", {"SLOTS": 4, "ITEMS": 9}),
    Model("ring_pipeline", {"N": 2, "SLOTS": 4, "SEGMENTS": 9, "SHORT": 1}),
    Model("ring_pipeline", {"SHORT": 2, "SEGMENTS": 2}),
    Model("ring_pipeline", {"STEPS": 3, "SLOTS": 4}),
    Model("messages", {"SLOTS": 2}),
    Model("messages", {"MESSAGES": 3}),
    Model("driver", {"STARTERS": 2}),
    Model("touching", {"N": 2, "BLOCKS": 3}),
    Model("cuda_meeting", {"BLOCKS": 1, "N": 3, "OPERATIONS": 3}),
    Model("cuda_one_shot", {"N": 2, "OPERATIONS": 8}),
    Model("cuda_direct", {"SLOTS": 3}),
    Model("cuda_two_shot", {"N": 2, "ITERATIONS": 6}),
    Model("cuda_mapped", {"N": 3, "BLOCKS": 1}),
    Model("cuda_ring", {"SLOTS": 2}),
    Model("cuda_ring", {"STEPS": 3}),
    Model("cuda_ring", {"N": 4, "SEGMENTS": 2}),
]

LARGE = [
    Model("bell", {"THREADS": 2, "ROUNDS": 3}),
    Model("handshake", {"OPERATIONS": 5}),
    Model("one_exchange", {"BLOCKS": 8}),
    Model("two_shot", {"BLOCKS": 7}),
    Model("two_shot", {"COUNTERS": 3, "BLOCKS": 6}),
    Model("ring_pipeline", {"SHORT": 1, "SEGMENTS": 9}),
    Model("messages", {"SLOTS": 2, "MESSAGES": 3}),
    Model("driver", {"WAITERS": 2}),
    Model("cuda_direct", {"N": 4, "ITERATIONS": 3}),
    Model("cuda_ring", {"N": 5, "SEGMENTS": 1}),
]
LARGEST = [
    Model("broadcast", {"N": 4}),
    Model("ring_pipeline", {"N": 4, "STEPS": 4, "SLOTS": 5}),
    Model("ring_pipeline", {"N": 4, "SLOTS": 8, "SEGMENTS": 4, "COUNT_ONLY": None}),
]

DEADLOCK = "invalid end state"
OVERWRITTEN = "assertion violated"

BROKEN = [
    (Model("bell", {"LOOK_THEN_ANNOUNCE": None}), DEADLOCK),
    (Model("bell", {"LOAD_BELL_LATE": None}), DEADLOCK),
    (Model("bell", {"SILENT_RING": None}), DEADLOCK),
    (Model("bell", {"RELEASE_POST": None}), DEADLOCK),
    (Model("bell", {"WAKE_ONE": None, "THREADS": 2}), DEADLOCK),
    (
        Model(
            "bell", {"ONLY_LAST_RINGS": None, "COUNT_THEN_STORE": None, "ROUNDS": 1, "POSTERS": 3}
        ),
        DEADLOCK,
    ),
    (Model("handshake", {"SLOTS": 1}), OVERWRITTEN),
    (Model("handshake", {"COUNTERS": 1}), DEADLOCK),
    (Model("handshake", {"REFUSAL_GOES_ON": None}), OVERWRITTEN),
    (Model("handshake", {"COMPARE_EARLY": None}), OVERWRITTEN),
    (Model("one_exchange", {"SLOTS": 3}), OVERWRITTEN),
    (Model("one_exchange", {"COUNTERS": 2}), DEADLOCK),
    (Model("one_exchange", {"NO_FINAL_POST": None}), OVERWRITTEN),
    (Model("two_shot", {"IN_SLOTS": 2}), OVERWRITTEN),
    (Model("two_shot", {"OUT_SLOTS": 1}), OVERWRITTEN),
    (Model("two_shot", {"COUNTERS": 2}), DEADLOCK),
    (Model("two_shot", {"NO_FINAL_POST": None}), OVERWRITTEN),
    (Model("two_shot", {"POST_OUT_EARLY": None}), OVERWRITTEN),
    (Model("broadcast", {"NO_WAIT": None}), OVERWRITTEN),
    (Model("broadcast", {"SHORT_WAIT": None}), OVERWRITTEN),
    (Model("broadcast", {"ONE_READER": None}), OVERWRITTEN),
    (Model("broadcast", {"ACK_EARLY": None}), OVERWRITTEN),
    (Model("broadcast", {"SILENT_ACK": None}), DEADLOCK),
    (Model("broadcast", {"RING_ONE": None}), DEADLOCK),
    (Model("gather", {"NO_WAIT": None}), OVERWRITTEN),
    (Model("gather", {"SHORT_WAIT": None}), OVERWRITTEN),
    (Model("gather", {"ACK_EARLY": None}), OVERWRITTEN),
    (Model("gather", {"SILENT_ACK": None}), DEADLOCK),
    (Model("gather", {"SILENT_SEND": None}), DEADLOCK),
    (Model("lane", {"OVERFILL": None}), OVERWRITTEN),
    (Model("lane", {"COMMIT_EARLY": None}), OVERWRITTEN),
    (Model("lane", {"RELEASE_EARLY": None}), OVERWRITTEN),
    (Model("lane", {"SILENT_COMMIT": None}), DEADLOCK),
    (Model("lane", {"SILENT_RELEASE": None}), DEADLOCK),
    (Model("ring_pipeline", {"N": 2, "SLOTS": 3}), DEADLOCK),
    (Model("ring_pipeline", {"SLOTS": 1}), DEADLOCK),
    (Model("ring_pipeline", {"SLOTS": 5}), DEADLOCK),
    (Model("ring_pipeline", {"STEPS": 3, "SLOTS": 3}), DEADLOCK),
    (Model("messages", {"WRITE_BLOCKS": None}), DEADLOCK),
    (Model("messages", {"WATCH_OUTPUT_ONLY": None}), DEADLOCK),
    (Model("messages", {"WATCH_RECEIVES_ONLY": None}), DEADLOCK),
    (Model("messages", {"CLEAR_IS_LOST": None}), DEADLOCK),
    (Model("driver", {"FORGOTTEN": None}), DEADLOCK),
    (Model("touching", {"NO_LOOK": None}), OVERWRITTEN),
    (Model("touching", {"LOOK_FIRST": None}), OVERWRITTEN),
    (Model("touching", {"NO_WAIT": None}), OVERWRITTEN),
    (Model("touching", {"WAIT_FIRST": None}), OVERWRITTEN),
    (Model("touching", {"DONE_EARLY": None}), OVERWRITTEN),
    (Model("cuda_meeting", {"PARITIES": 1}), OVERWRITTEN),
    (Model("cuda_meeting", {"NO_MEETING": None}), OVERWRITTEN),
    (Model("cuda_one_shot", {"PARITIES": 1}), DEADLOCK),
    (Model("cuda_one_shot", {"NO_HEADER_WAIT": None}), DEADLOCK),
    (Model("cuda_direct", {"SLOTS": 1}), OVERWRITTEN),
    (Model("cuda_direct", {"POST_EARLY": None}), OVERWRITTEN),
    (Model("cuda_two_shot", {"NO_WAIT_OUT": None}), OVERWRITTEN),
    (Model("cuda_two_shot", {"NO_WAIT_IN": None}), OVERWRITTEN),
    (Model("cuda_two_shot", {"POST_IN_EARLY": None}), OVERWRITTEN),
    (Model("cuda_mapped", {"NO_MEETING": None}), OVERWRITTEN),
    (Model("cuda_mapped", {"NO_WAIT": None}), OVERWRITTEN),
    (Model("cuda_mapped", {"POST_EARLY": None}), OVERWRITTEN),
    (Model("cuda_ring", {"SLOTS": 1}), DEADLOCK),
    (Model("cuda_ring", {"SLOTS": 2, "FREE_AHEAD": 0}), OVERWRITTEN),
    (Model("cuda_ring", {"TAIL_EARLY": None}), OVERWRITTEN),
    (Model("cuda_ring", {"SLOTS": 2, "HEAD_EARLY": None}), OVERWRITTEN),
]


def check_right(model: Model, timeout_s: float) -> None:
    verdict = check(model, timeout_s)
    assert verdict.error == "", verdict.output
    assert verdict.complete, f"not all states were searched:\n{verdict.output}"
    assert verdict.states > 100, "there is next to nothing in this model"


@pytest.mark.parametrize("name", NAMES)
def test_the_code(name: str) -> None:
    check_right(models_of_the_code()[name], timeout_s=60)


@pytest.mark.parametrize("model", RIGHT, ids=str)
def test_right(model: Model) -> None:
    check_right(model, timeout_s=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [*LARGE, *(pytest.param(model, marks=pytest.mark.full) for model in LARGEST)],
    ids=str,
)
def test_large(model: Model) -> None:
    check_right(model, timeout_s=400)


@pytest.mark.parametrize(
    ("model", "error"), BROKEN, ids=lambda x: str(x) if isinstance(x, Model) else ""
)
def test_broken(model: Model, error: str) -> None:
    verdict = check(model, error_expected=True)
    assert verdict.error.startswith(error), verdict.output


def test_every_model_has_a_broken_variant() -> None:
    assert {model.name for model, _ in BROKEN} == set(NAMES) == set(models_of_the_code())


def test_posts_are_sequentially_consistent() -> None:
    assert weak_posts() == []
