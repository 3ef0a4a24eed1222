"""The matrix itself: it is the committed one, it covers what it says, and it skips nothing else."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import astuple, fields

import generator
import pytest
from generator import AXES, EXCLUSIONS, Case

pytestmark = pytest.mark.slow

NAMES = [field.name for field in fields(Case)]


def excluding(case: Case) -> list[str]:
    """The reasons that forbid the case."""
    return [
        exclusion.reason
        for exclusion in EXCLUSIONS
        if exclusion.excludes(*(getattr(case, axis) for axis in exclusion.axes))
    ]


def pairs_of(case: Case) -> itertools.combinations:
    return itertools.combinations(zip(NAMES, astuple(case), strict=True), 2)


def test_the_committed_file_states_this_matrix() -> None:
    committed = json.loads(generator.MATRIX_FILE.read_text(encoding="utf-8"))
    current = json.loads(generator.description_as_text())
    assert current == committed, "if this is intended: python tests/generator.py, and say why"


def test_every_skip_has_its_reason_and_every_other_pair_a_case() -> None:
    committed = json.loads(generator.MATRIX_FILE.read_text(encoding="utf-8"))
    skipped = {
        (entry["axes"], pair)
        for entry in committed["skipped"]
        for pair in entry["pairs"]
        if entry["reason"]
    }
    covered = {pair for case in generator.sample() for pair in pairs_of(case)}
    for one, two in itertools.combinations(NAMES, 2):
        for a, b in itertools.product(AXES[one], AXES[two]):
            is_covered = ((one, a), (two, b)) in covered
            is_skipped = (f"{one} × {two}", f"{a} × {b}") in skipped
            assert is_covered != is_skipped, (one, a, two, b)


def test_axes_and_case_name_the_same_things_in_the_same_order() -> None:
    assert list(AXES) == NAMES
    values = [value for axis in AXES.values() for value in axis]
    repeated = {value for value, times in Counter(values).items() if times > 1}
    assert repeated == {"1", "2", "3"}, "sizes of groups and of tensors"


def test_no_case_is_excluded_and_none_comes_twice() -> None:
    for cases in (generator.sample(), generator.full()):
        assert len({case.id for case in cases}) == len(cases)
        assert not any(excluding(case) for case in cases)


def test_the_full_run_is_the_product_of_all_axes_but_two() -> None:
    full = generator.full()
    outer = {astuple(case)[:-2] for case in full}
    axes = {**AXES, "group": generator.GROUPS_OF_FULL_RUN}
    expected = {
        values
        for values in itertools.product(*list(axes.values())[:-2])
        if not excluding(Case(*values, "1", "sync"))
    }
    assert outer == expected
    numels = Counter(case.numel for case in full if case.layout != "zero_dim")
    assert set(numels) == set(AXES["numel"])
    assert max(numels.values()) - min(numels.values()) <= 1
    for form in AXES["form"]:
        combined = {(case.numel, case.mode) for case in full if case.form == form}
        assert combined == set(itertools.product(AXES["numel"], AXES["mode"]))


def test_a_case_knows_its_group_and_size() -> None:
    case = Case("all_reduce", "int8", "sum", "strided", "4:1,3", "auto", "n+1", "sync")
    assert (case.world_size, case.members, case.num_elements) == (4, (1, 3), 3)
    assert case.id == "all_reduce|int8|sum|strided|4:1,3|auto|n+1|sync"
    assert Case.from_id(case.id) == case
    whole = Case("broadcast", "bool", "none", "offset", "3", "auto", "n-1", "async")
    assert (whole.world_size, whole.members, whole.num_elements) == (3, (0, 1, 2), 2)
