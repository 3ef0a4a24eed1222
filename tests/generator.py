"""The matrix of collective cases: axes, declared exclusions, a pairwise sample, the full product.

A case is one value on each axis. The *sample* is a covering array: every pair of values of two axes
that some case can contain is contained in at least one case of the sample. The *full* run adds
world size 8 and takes the product of all axes but the last two (numel and mode), which go round and
round along it: the product with them as well would be millions of cases.

Nothing is skipped that is not declared in `EXCLUSIONS` with a reason. `matrix.json` states all this,
with the sample; `python tests/generator.py` writes it and a test holds it against this module.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch

from pycoll import reference

MATRIX_FILE = Path(__file__).with_name("matrix.json")

REDUCTIONS = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_uneven",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_in_place",
    "reduce_scatter_tensor_coalesced",
)
MOVEMENTS = (
    "all_gather",
    "all_gather_uneven",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_in_place",
    "all_gather_into_tensor_coalesced",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_uneven",
    "all_to_all_single",
    "all_to_all_single_uneven",
    "send_recv",
)
ROOTED = ("broadcast", "gather", "reduce", "scatter")
ALGORITHMS = {  # by the beginning of a form's name; the first that fits
    "all_reduce": ("auto", "one_shot", "two_shot", "ring"),
    "reduce_scatter": ("auto", "direct", "ring"),
    "reduce": ("auto", "one_shot", "two_shot"),
    "all_gather": ("auto", "direct", "ring"),
    "broadcast": ("auto", "direct"),
    "gather": ("auto", "direct"),
    "scatter": ("auto", "direct"),
    "all_to_all": ("auto", "direct"),
    "send_recv": ("auto",),
}
DTYPES = (
    *reference.FLOAT_DTYPES,
    *reference.COMPLEX_DTYPES,
    *reference.INTEGER_DTYPES,
    torch.bool,
)
# These have no arithmetic: they are moved, not reduced.
MOVED_DTYPES = (torch.float8_e8m0fnu,)
AXES = {
    "form": (*REDUCTIONS, *MOVEMENTS),
    "dtype": tuple(str(dtype).removeprefix("torch.") for dtype in (*DTYPES, *MOVED_DTYPES)),
    "op": (*reference.OPS, "none"),
    "layout": ("contiguous", "offset", "transposed", "strided", "zero_dim", "expanded"),
    # World size, and the members where they are not the whole world.
    "group": ("1", "2", "3", "4", "3:0,2", "4:1,3"),
    "algorithm": ("auto", "one_shot", "two_shot", "ring", "direct"),
    # Elements of what one rank contributes or receives; n is the size of the group. Uneven forms
    # have chunks of this size and of others.
    "numel": (
        *("0", "1", "2", "3", "n-1", "n", "n+1", "17"),
        *("1023", "1025", "4099", "65537", "1000003"),
    ),
    "mode": ("sync", "async", "async_reverse"),
}
GROUPS_OF_FULL_RUN = (*AXES["group"], "8")


@dataclass(frozen=True)
class Case:
    """One value on each axis, in the order of `AXES`."""

    form: str
    dtype: str
    op: str
    layout: str
    group: str
    algorithm: str
    numel: str
    mode: str

    @property
    def id(self) -> str:
        return "|".join(astuple(self))

    @classmethod
    def from_id(cls, name: str) -> Case:
        return cls(*name.split("|"))

    @property
    def world_size(self) -> int:
        return int(self.group.partition(":")[0])

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the world that are in the group."""
        named = self.group.partition(":")[2]
        return tuple(map(int, named.split(","))) if named else tuple(range(self.world_size))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_elements(self) -> int:
        n = len(self.members)
        return (
            {"n-1": n - 1, "n": n, "n+1": n + 1}[self.numel]
            if "n" in self.numel
            else int(self.numel)
        )


class Exclusion(NamedTuple):
    """Two axes, and which pairs of their values no case can contain."""

    axes: tuple[str, str]
    reason: str
    excludes: Callable[[str, str], bool]


def _algorithms_of(form: str) -> tuple[str, ...]:
    return next(names for prefix, names in ALGORITHMS.items() if form.startswith(prefix))


def _has_read_only_input(form: str) -> bool:
    in_place = form.endswith("in_place") or form in ("reduce", "broadcast")
    return not in_place and not form.startswith("all_reduce")


EXCLUSIONS = (
    Exclusion(
        ("form", "op"),
        "a reduction has an op, a movement of data has none",
        lambda form, op: (form in REDUCTIONS) != (op != "none"),
    ),
    Exclusion(
        ("dtype", "op"),
        "the op has no meaning for the dtype; that pycoll refuses it is tested by itself",
        lambda dtype, op: op != "none" and not reference.is_valid(op, getattr(torch, dtype)),
    ),
    Exclusion(
        ("form", "algorithm"),
        "the collective has no such algorithm",
        lambda form, algorithm: algorithm not in _algorithms_of(form),
    ),
    Exclusion(
        ("layout", "numel"),
        "a tensor of no dims has one element",
        lambda layout, numel: layout == "zero_dim" and numel != "1",
    ),
    Exclusion(
        ("form", "layout"),
        "an expanded tensor can be read, but not written to",
        lambda form, layout: layout == "expanded" and not _has_read_only_input(form),
    ),
    Exclusion(
        ("form", "layout"),
        "a part of a tensor, and a tensor of another size than the others', has at least one dim",
        lambda form, layout: layout == "zero_dim" and form.endswith(("in_place", "uneven")),
    ),
    Exclusion(
        ("form", "group"),
        "a rank alone has nobody to send to",
        lambda form, group: form == "send_recv" and group == "1",
    ),
)


class Pair(NamedTuple):
    """Two (axis index, value) choices, the lower axis first."""

    first: tuple[int, str]
    second: tuple[int, str]


class Sampler:
    """Greedy pairwise covering: the same sample on every machine, because the seed is fixed."""

    CANDIDATES = 6  # tried for each new case; more make a slightly smaller sample, slowly

    def __init__(self, axes: dict[str, tuple[str, ...]], seed: int = 20) -> None:
        self.values = list(axes.values())
        self.names = list(axes)
        self.excluded = excluded_pairs(axes)
        self.random = random.Random(seed)

    def sample(self) -> tuple[list[Case], list[Pair]]:
        """See `sample_and_unreachable`."""
        # A dict where a set would do: its order is the same in every run.
        uncovered = dict.fromkeys(pair for pair in self._all_pairs() if pair not in self.excluded)
        cases: list[Case] = []
        unreachable: list[Pair] = []
        while uncovered:
            chosen = self._best_candidate(uncovered)
            if chosen is None:
                pair = next(iter(uncovered))
                chosen = self._complete(dict(pair))
                if chosen is None:
                    unreachable.append(pair)
                    del uncovered[pair]
                    continue
            for pair in _pairs_of(chosen):
                uncovered.pop(pair, None)
            cases.append(Case(*(chosen[axis] for axis in range(len(self.values)))))
        return cases, unreachable

    def _all_pairs(self) -> Iterator[Pair]:
        for i, j in itertools.combinations(range(len(self.values)), 2):
            for a, b in itertools.product(self.values[i], self.values[j]):
                yield Pair((i, a), (j, b))

    def _fits(self, chosen: dict[int, str], axis: int, value: str) -> bool:
        return all(_pair(axis, value, i, a) not in self.excluded for i, a in chosen.items())

    def _best_candidate(self, uncovered: dict[Pair, None]) -> dict[int, str] | None:
        pairs = list(uncovered)
        best, best_gain = None, 0
        for _ in range(self.CANDIDATES):
            chosen = self._grow(dict(self.random.choice(pairs)), uncovered)
            if chosen is not None:
                gain = sum(pair in uncovered for pair in _pairs_of(chosen))
                if gain > best_gain:
                    best, best_gain = chosen, gain
        return best

    def _grow(self, chosen: dict[int, str], uncovered: dict[Pair, None]) -> dict[int, str] | None:
        """Fill the other axes, each with the value that covers most; None at a dead end."""
        axes = [axis for axis in range(len(self.values)) if axis not in chosen]
        self.random.shuffle(axes)
        for axis in axes:
            scored = [
                (sum(_pair(axis, v, i, a) in uncovered for i, a in chosen.items()), v)
                for v in self.values[axis]
                if self._fits(chosen, axis, v)
            ]
            if not scored:
                return None
            most = max(gain for gain, _ in scored)
            best = [value for gain, value in scored if gain == most]
            if most == 0 and self.names[axis] == "numel":
                best = [value for value in best if len(value) < 5] or best  # cheap ones
            chosen[axis] = self.random.choice(best)
        return chosen

    def _complete(self, chosen: dict[int, str]) -> dict[int, str] | None:
        """Fill the other axes by exhaustive search; None if that is impossible."""
        axis = next((axis for axis in range(len(self.values)) if axis not in chosen), None)
        if axis is None:
            return chosen
        for value in self.values[axis]:
            if self._fits(chosen, axis, value):
                done = self._complete({**chosen, axis: value})
                if done is not None:
                    return done
        return None


def _pair(i: int, a: str, j: int, b: str) -> Pair:
    return Pair((i, a), (j, b)) if i < j else Pair((j, b), (i, a))


def _pairs_of(chosen: dict[int, str]) -> Iterator[Pair]:
    return (Pair(*pair) for pair in itertools.combinations(sorted(chosen.items()), 2))


def excluded_pairs(axes: dict[str, tuple[str, ...]]) -> dict[Pair, str]:
    """Every excluded pair of values, with the reason."""
    index = {name: axis for axis, name in enumerate(axes)}
    excluded: dict[Pair, str] = {}
    for exclusion in EXCLUSIONS:
        first, second = exclusion.axes
        for a, b in itertools.product(axes[first], axes[second]):
            if exclusion.excludes(a, b):
                excluded.setdefault(_pair(index[first], a, index[second], b), exclusion.reason)
    return excluded


@functools.cache
def sample_and_unreachable() -> tuple[tuple[Case, ...], tuple[Pair, ...]]:
    """The pairwise sample, and the pairs that no case can contain although no exclusion says so."""
    cases, unreachable = Sampler(AXES).sample()
    return tuple(cases), tuple(unreachable)


def sample() -> list[Case]:
    """The committed one: to read it is faster than to compute it, and a test compares the two."""
    committed = json.loads(MATRIX_FILE.read_text(encoding="utf-8"))
    return [Case.from_id(name) for name in committed["sample"]]


@functools.cache
def full() -> tuple[Case, ...]:
    """The product of all axes but numel and mode, which rotate."""
    axes = {**AXES, "group": GROUPS_OF_FULL_RUN}
    excluded = excluded_pairs(axes)
    numels, modes = itertools.cycle(axes["numel"]), itertools.cycle(axes["mode"])
    outer = [axes[name] for name in list(axes)[:-2]]
    cases = []
    for values in itertools.product(*outer):
        if any(pair in excluded for pair in _pairs_of(dict(enumerate(values)))):
            continue
        numel = "1" if "zero_dim" in values else next(numels)
        cases.append(Case(*values, numel, next(modes)))
    return tuple(cases)


def description() -> dict[str, object]:
    """What `matrix.json` states: the axes, how many cases there are, and every skip."""
    cases, unreachable = sample_and_unreachable()
    names = [field.name for field in fields(Case)]
    reasons = excluded_pairs({**AXES, "group": GROUPS_OF_FULL_RUN})
    reasons |= dict.fromkeys(unreachable, "the other skips leave no case for it")
    skipped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (first, second), reason in reasons.items():
        axes = f"{names[first[0]]} × {names[second[0]]}"
        skipped[axes, reason].append(f"{first[1]} × {second[1]}")
    return {
        "axes": AXES,
        "groups of the full run": GROUPS_OF_FULL_RUN,
        "skipped": [
            {"axes": axes, "reason": reason, "pairs": pairs}
            for (axes, reason), pairs in skipped.items()
        ],
        "cases of the full run": len(full()),
        "cases of the sample": len(cases),
        "sample": [case.id for case in cases],
    }


def description_as_text() -> str:
    return json.dumps(description(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    MATRIX_FILE.write_text(description_as_text())
