"""Calls of the Triton kernels with what they must give, wherever they run: by the interpreter (triton_ranks.py) or on
a GPU (tools/gpu_parts/triton_values.py)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from case_data import contribution, premul_factors, uneven_numel
from checker import assert_same_bits
from torch import Tensor

from pycoll import ops, reference
from pycoll.testing import check_guards, guarded
from pycoll.triton_kernels.launching import LaunchConfig

KERNELS = ("one_shot", "two_shot", "ring", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class Place:
    """Where kernels run, how they are launched, and what room a group has."""

    device: str
    config: LaunchConfig
    slot_bytes: int
    mailbox_bytes: int

    def finish(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


INTERPRETER = Place("cpu", LaunchConfig(num_blocks=2, num_warps=1, bytes_per_thread=16), 128, 4096)


@dataclass(frozen=True)
class Case:
    kernel: str
    dtype: torch.dtype
    op: str
    numel: int
    shift: int  # elements by which tensors are not aligned
    in_place: bool
    uneven: bool

    def __str__(self) -> str:
        place = "in place" if self.in_place else "out"
        chunks = "uneven" if self.uneven else "even"
        return f"{self.kernel} {self.dtype} {self.op} {self.numel} +{self.shift} {place} {chunks}"


@dataclass
class Trial:
    """One rank's call of a case.

    start: calls the launcher, for this rank's group. wanted: what tensors must hold when the kernel has ended.
    nan_payload: whether two NaN with different bits differ. buffers: tensors within guards.
    """

    start: Callable[[Any], object]
    wanted: list[tuple[str, Tensor, Tensor]]
    nan_payload: bool
    buffers: list[Tensor] = field(default_factory=list)

    def check(self) -> None:
        """
        Raises:
            AssertionError: a wrong result, or a write beside it.
        """
        for what, got, want in self.wanted:
            assert_same_bits(got.cpu(), want, what, nan_payload=self.nan_payload)
        for buffer in self.buffers:
            check_guards(buffer)


@functools.lru_cache(maxsize=16)
def input_of(case: Case, numel: int, rank: int, world_size: int, salt: int) -> Tensor:
    """A ring adds in another order, so its sums are exact."""
    exact = case.kernel == "ring"
    op = "none" if case.kernel == "all_gather" else case.op
    return contribution(
        case.dtype, op, numel, rank=rank, world_size=world_size, salt=salt, exact=exact
    )


@functools.lru_cache(maxsize=1)
def reduced(case: Case, numel: int, factors: tuple[float, ...] | None, n: int, salt: int) -> Tensor:
    inputs = [input_of(case, numel, rank, n, salt) for rank in range(n)]
    return reference.reduce_ranks(inputs, case.op, factor=factors)


def trial_of(case: Case, rank: int, world_size: int, salt: int, device: str = "cpu") -> Trial:
    numels = [uneven_numel(case.numel, i) if case.uneven else case.numel for i in range(world_size)]
    if case.kernel == "all_gather":
        return _all_gather(case, rank, numels, salt, device)
    return _reduction(case, rank, numels, salt, device)


def _guarded(case: Case, values: Tensor, device: str) -> Tensor:
    return guarded(values.to(device), offset_bytes=case.shift * values.element_size())


def _all_gather(case: Case, rank: int, numels: list[int], salt: int, device: str) -> Trial:
    n, begin = len(numels), sum(numels[:rank])
    rows = [input_of(case, numels[i], i, n, salt) for i in range(n)]
    zeros = torch.zeros(sum(numels), dtype=torch.uint8).to(case.dtype)
    whole = _guarded(case, zeros, device)
    own = whole[begin : begin + numels[rank]]
    source = own.copy_(rows[rank]) if case.in_place else _guarded(case, rows[rank], device)
    expected = torch.cat([row.view(torch.uint8) for row in rows]).view(case.dtype)

    def start(group: Any) -> object:
        from pycoll.triton_kernels import collectives

        return collectives.all_gather(group, source, whole, numels=numels)

    wanted = [("the output", whole, expected)]
    return Trial(start, wanted, True, [whole] if case.in_place else [whole, source])


def _reduction(case: Case, rank: int, numels: list[int], salt: int, device: str) -> Trial:
    n, begin = len(numels), sum(numels[:rank])
    scatters = case.kernel == "reduce_scatter"
    numel = sum(numels) if scatters else case.numel
    factors = None
    if case.op == "premul_sum":
        factors = tuple(premul_factors(n, exact=case.kernel == "ring"))
    own, expected = input_of(case, numel, rank, n, salt), reduced(case, numel, factors, n, salt)
    source = _guarded(case, own, device)
    target = source
    if scatters:
        expected = expected[begin : begin + numels[rank]]
        target = source[begin : begin + numels[rank]]
    if not case.in_place:
        target = _guarded(case, torch.zeros_like(expected), device)
    how: dict[str, Any] = {"factor": factors[rank]} if factors else {}

    def start(group: Any) -> object:
        from pycoll.triton_kernels import collectives

        if scatters:
            return collectives.reduce_scatter(group, source, target, case.op, numels=numels, **how)
        return collectives.all_reduce(group, source, target, case.op, algorithm=case.kernel, **how)

    trial = Trial(start, [("the output", target, expected)], False, [source])
    if not case.in_place:
        trial.wanted.append(("the input", source, own))
        trial.buffers.append(target)
    return trial


# ---- kernels of one rank


def moved_buckets(
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]],
    place: Place = INTERPRETER,
    numels: Sequence[int] = (7, 1, 211, 0, 100, 1009, 5),
) -> list[str]:
    """flatten and unflatten against pycoll.ops on the CPU, to the bit; complaints. Tensors are not all aligned, and one
    is missing."""
    ways: list[dict[str, Any]] = [{}, {"scale": 0.37}, {"scale": 1.5, "accumulate": True}]
    complaints = []
    for tensor_dtype, bucket_dtype in dtypes:
        computes = tensor_dtype != bucket_dtype or tensor_dtype.is_floating_point
        generator = torch.Generator().manual_seed(3)
        tensors: list[Tensor | None] = [
            (torch.randn(numel, generator=generator) * 10.0 ** (i - 3)).to(tensor_dtype)
            for i, numel in enumerate(numels)
        ]
        tensors[4] = None
        for how in ways[: 3 if computes else 1]:
            complaints += _moved_bucket(tensors, list(numels), bucket_dtype, how, place)
    return complaints


def _moved_bucket(
    tensors: list[Tensor | None],
    numels: list[int],
    bucket_dtype: torch.dtype,
    how: dict[str, Any],
    place: Place,
) -> list[str]:
    """There and back."""
    from pycoll.triton_kernels import bucket

    device, example = place.device, next(tensor for tensor in tensors if tensor is not None)
    start = (torch.arange(sum(numels)) % 13).to(bucket_dtype)
    got, want = guarded(start.to(device)), start.clone()
    sources = [
        None if t is None else guarded(t.to(device), offset_bytes=t.element_size() * (i % 3))
        for i, t in enumerate(tensors)
    ]
    bucket.flatten_into(got, bucket.BucketTable(sources, numels), config=place.config, **how)
    ops.flatten_into(want, tensors, numels=numels, **how)
    back = [None if t is None else guarded(torch.zeros_like(t, device=device)) for t in tensors]
    expected = [None if t is None else torch.zeros_like(t) for t in tensors]
    flat = want.to(device)
    bucket.unflatten_into(flat, bucket.BucketTable(back, numels), config=place.config, **how)
    ops.unflatten_into(want, expected, numels=numels, **how)
    place.finish()
    pairs = [("flatten", got, want)]
    for a, b in zip(back, expected, strict=True):
        if a is not None and b is not None:
            pairs.append(("unflatten", a, b))
    what = f"{example.dtype}, bucket of {bucket_dtype}, {how}"
    return complaints_about(what, [(name, a, b, True) for name, a, b in pairs])


def complaints_about(what: str, pairs: Sequence[tuple[str, Tensor, Tensor, bool]]) -> list[str]:
    """`pairs`: a name, a guarded tensor, what it must hold, whether bits of NaN count."""
    complaints = []
    for name, got, want, nan_payload in pairs:
        try:
            assert_same_bits(got.cpu(), want, name, nan_payload=nan_payload)
            check_guards(got)
        except AssertionError as error:
            complaints.append(f"{what}: {error}")
    return complaints


def scales_and_amax(place: Place = INTERPRETER) -> tuple[float, float, bool]:
    """The largest magnitude with and without NaN, and whether a factor in device memory multiplies."""
    from pycoll.triton_kernels import bucket as triton_bucket

    x = torch.arange(701.0, device=place.device) - 700.0
    found = []
    for value in (0.0, float("nan")):
        x[13] = value
        amax, bucket = (torch.zeros(numel, device=place.device) for numel in (1, 701))
        triton_bucket.flatten_into(
            bucket,
            triton_bucket.BucketTable([x]),
            scale=2.0,
            device_scale=torch.tensor([0.5], device=place.device),
            amax=amax,
            config=place.config,
        )
        found.append(float(amax))
    return found[0], found[1], bool(torch.equal(bucket[14:], x[14:]))


def quantised_blocks(
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]],
    sizes: Sequence[tuple[int, int]],
    place: Place = INTERPRETER,
) -> list[str]:
    """quantise and dequantise against pycoll.ops on the CPU, to the bit; complaints."""
    from pycoll.triton_kernels import quantise

    device, complaints = place.device, []
    for (dtype, code_dtype), (numel, block) in itertools.product(dtypes, sizes):
        values = _hard_to_quantise(numel, block).to(dtype)
        codes = guarded(torch.zeros(numel, dtype=torch.uint8, device=device).view(code_dtype))
        scales = guarded(torch.zeros(-(-numel // block), device=device))
        quantise.quantise_blocks(values.to(device), block, code_dtype, codes=codes, scales=scales)
        output = guarded(torch.zeros_like(values, device=device))
        quantise.dequantise_blocks(codes, scales, block, dtype, output=output)
        place.finish()
        want_codes, want_scales = ops.quantise_blocks(values, block, code_dtype)
        want = ops.dequantise_blocks(want_codes, want_scales, block, dtype)
        complaints += complaints_about(
            f"{dtype} {code_dtype} {numel} by {block}",
            [
                ("codes", codes, want_codes, True),
                ("scales", scales, want_scales, False),
                ("elements", output, want, False),
            ],
        )
    return complaints


def _hard_to_quantise(numel: int, block: int) -> Tensor:
    """Of all magnitudes, with zeros, a subnormal number and an infinity."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator)
    values *= 10.0 ** torch.randint(-4, 4, (numel,), generator=generator)
    values[: block // 2] = 0.0
    values[-1] = 1e-44
    if numel > 3 * block:
        values[2 * block] = float("inf")
    return values
