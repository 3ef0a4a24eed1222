"""What ranks of the interpreter do with Triton kernels: cases of test_triton_kernels.py, run and checked on each
rank."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from case_data import contribution, premul_factors, uneven_numel
from checker import assert_same_bits
from torch import Tensor
from triton_interpreter import make_interpreter_fast

from pycoll import reference
from pycoll.testing import check_guards, guarded

SLOT_BYTES = 128
MAILBOX_BYTES = 4096
KERNELS = ("one_shot", "two_shot", "ring", "reduce_scatter", "all_gather")


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


@functools.cache
def group_of_rank(timeout_s: float = 300.0) -> Any:
    make_interpreter_fast()
    from pycoll.triton_kernels.group import TritonGroup
    from pycoll.triton_kernels.launching import LaunchConfig

    config = LaunchConfig(num_blocks=2, num_warps=1, bytes_per_thread=16)
    return TritonGroup.of_process_group(
        device="cpu",
        config=config,
        slot_bytes=SLOT_BYTES,
        mailbox_bytes=MAILBOX_BYTES,
        timeout_s=timeout_s,
    )


def inputs_of(case: Case, numel: int, salt: int) -> list[Tensor]:
    """Every rank's. A ring adds in another order, so its sums are exact."""
    n = dist.get_world_size()
    exact = case.kernel == "ring"
    op = "none" if case.kernel == "all_gather" else case.op
    return [
        contribution(case.dtype, op, numel, rank=rank, world_size=n, salt=salt, exact=exact)
        for rank in range(n)
    ]


def run_case(case: Case, salt: int) -> None:
    from pycoll.triton_kernels import collectives

    group, rank, n = group_of_rank(), dist.get_rank(), dist.get_world_size()
    offset = case.shift * torch.empty(0, dtype=case.dtype).element_size()
    numels = [uneven_numel(case.numel, i) if case.uneven else case.numel for i in range(n)]
    begin = sum(numels[:rank])
    factors = premul_factors(n, exact=case.kernel == "ring")
    how: dict[str, Any] = {}
    if case.op == "premul_sum":
        how["factor"] = factors[rank]
    reduces = case.kernel != "all_gather"
    factor = factors if case.op == "premul_sum" else None
    if case.kernel == "all_gather":
        rows = [inputs_of(case, numels[i], salt)[i] for i in range(n)]
        whole = guarded(
            torch.zeros(sum(numels), dtype=torch.uint8).to(case.dtype), offset_bytes=offset
        )
        own = whole[begin : begin + numels[rank]]
        source = (
            own.copy_(rows[rank]) if case.in_place else guarded(rows[rank], offset_bytes=offset)
        )
        collectives.all_gather(group, source, whole, numels=numels)
        results, expected = (
            [whole],
            torch.cat([row.view(torch.uint8) for row in rows]).view(case.dtype),
        )
    else:
        numel = sum(numels) if case.kernel == "reduce_scatter" else case.numel
        inputs = inputs_of(case, numel, salt)
        source = guarded(inputs[rank], offset_bytes=offset)
        total = reference.reduce_ranks(inputs, case.op, factor=factor)
        if case.kernel == "reduce_scatter":
            expected = total[begin : begin + numels[rank]]
            target = source[begin : begin + numels[rank]]
            if not case.in_place:
                target = guarded(torch.zeros_like(expected), offset_bytes=offset)
            collectives.reduce_scatter(group, source, target, case.op, numels=numels, **how)
        else:
            expected = total
            target = source
            if not case.in_place:
                target = guarded(torch.zeros_like(expected), offset_bytes=offset)
            collectives.all_reduce(group, source, target, case.op, algorithm=case.kernel, **how)
        results = [target]
        if not case.in_place:
            assert_same_bits(source, inputs[rank], "the input", nan_payload=False)
    group.check()
    assert_same_bits(results[0], expected, "the output", nan_payload=not reduces)
    check_guards(whole if case.kernel == "all_gather" else source)
    if not case.in_place:
        check_guards(results[0] if reduces else source)


def run_cases(cases: Sequence[Case]) -> dict[str, str]:
    """What went wrong, by case. Ranks come late at random."""
    late = random.Random(dist.get_rank())
    failures = {}
    for salt, case in enumerate(cases):
        if late.random() < 0.05:
            time.sleep(0.02)
        try:
            run_case(case, salt)
        except AssertionError as error:
            failures[str(case)] = str(error)
    return failures


def start_at(epoch: int) -> None:
    """As if so many operations, modulo 2^32, had been before."""
    group = group_of_rank()
    memory, _ = group._keep
    control, signals, rings, *_ = group.layout.sizes()
    signed = (epoch + 2**31) % 2**32 - 2**31
    dist.barrier()
    group.epochs.fill_(signed)
    memory[:control].view(torch.int32).fill_(signed)
    memory[control : control + signals + rings].view(torch.int64).fill_(signed << 32)
    dist.barrier()


def epochs_wrap_around() -> dict[str, str]:
    failures = {}
    for epoch in (2**32 - 2, 2**31 - 2):
        start_at(epoch)
        cases = [Case(kernel, torch.float32, "sum", 37, 0, False, False) for kernel in KERNELS]
        failures |= {f"{epoch}: {name}": text for name, text in run_cases(cases).items()}
    return failures


def late_rank(algorithm: str) -> tuple[str, list[int]]:
    """Rank 1 does not come; what the others' check says, and the record."""
    group_of_rank.cache_clear()
    group = group_of_rank(0.01)
    from pycoll.triton_kernels import collectives

    text = ""
    if dist.get_rank() != 1:
        collectives.all_reduce(group, torch.ones(40), algorithm=algorithm)
        # All later kernels return at once.
        collectives.all_reduce(group, torch.ones(40), algorithm=algorithm)
        try:
            group.check()
        except dist.DistBackendError as error:
            text = str(error)
    return text, group.record.tolist()


def mismatch(algorithm: str) -> tuple[str, bool]:
    """Rank 1 adds one element more: what each rank says, and whether its output is untouched."""
    group_of_rank.cache_clear()
    group = group_of_rank(5.0)
    from pycoll.triton_kernels import collectives

    x = torch.ones(41 if dist.get_rank() == 1 else 40)
    y = torch.full_like(x, 7.0)
    collectives.all_reduce(group, x, y, algorithm=algorithm)
    try:
        group.check()
    except dist.DistBackendError as error:
        return str(error), bool((y == 7.0).all())
    return "", False


def aborted() -> bool:
    """The host gives up: kernels return, and check says so."""
    group_of_rank.cache_clear()
    group = group_of_rank(300.0)
    from pycoll.triton_kernels import collectives

    group.abort()
    y = torch.full((40,), 7.0)
    collectives.all_reduce(group, torch.ones(40), y)
    try:
        group.check()
    except dist.DistBackendError as error:
        return "aborted" in str(error) and bool((y == 7.0).all())
    return False


# ---- kernels of one rank


def moved_buckets(dtypes: Sequence[tuple[torch.dtype, torch.dtype]]) -> list[str]:
    """flatten and unflatten against pycoll.ops, to the bit; complaints."""
    make_interpreter_fast()
    from pycoll import ops
    from pycoll.triton_kernels import bucket as triton_bucket
    from pycoll.triton_kernels.launching import LaunchConfig

    config = LaunchConfig(num_blocks=2, num_warps=1, bytes_per_thread=16)
    numels = [7, 1, 211, 0, 100, 1009, 5]
    complaints = []
    for tensor_dtype, bucket_dtype in dtypes:
        computes = tensor_dtype != bucket_dtype or tensor_dtype.is_floating_point
        generator = torch.Generator().manual_seed(3)
        tensors: list[Tensor | None] = []
        for i, numel in enumerate(numels):
            values = torch.randn(numel, generator=generator) * 10.0 ** (i - 3)
            size = torch.empty(0, dtype=tensor_dtype).element_size()
            tensors.append(guarded(values.to(tensor_dtype), offset_bytes=size * (i % 3)))
        tensors[4] = None
        table = triton_bucket.BucketTable(tensors, numels)
        for how in [{}, {"scale": 0.37}, {"scale": 1.5, "accumulate": True}][
            : 3 if computes else 1
        ]:
            start = (torch.arange(sum(numels)) % 13).to(bucket_dtype)
            got, want = guarded(start), start.clone()
            triton_bucket.flatten_into(got, table, config=config, **how)
            ops.flatten_into(want, tensors, numels=numels, **how)
            if not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
                complaints.append(f"flatten {tensor_dtype} to {bucket_dtype} {how}")
            check_guards(got)
            back = [None if t is None else guarded(torch.zeros_like(t)) for t in tensors]
            expected = [None if t is None else torch.zeros_like(t) for t in tensors]
            triton_bucket.unflatten_into(
                want, triton_bucket.BucketTable(back, numels), config=config, **how
            )
            ops.unflatten_into(want, expected, numels=numels, **how)
            for a, b in zip(back, expected, strict=True):
                if a is not None and b is not None:
                    check_guards(a)
                    if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                        complaints.append(f"unflatten {bucket_dtype} to {tensor_dtype} {how}")
    return complaints


def scales_and_amax() -> tuple[float, float, bool]:
    """The largest magnitude with and without NaN, and whether a factor in device memory multiplies."""
    make_interpreter_fast()
    from pycoll.triton_kernels import bucket as triton_bucket
    from pycoll.triton_kernels.launching import LaunchConfig

    config = LaunchConfig(num_blocks=2, num_warps=1, bytes_per_thread=16)
    x = torch.arange(701.0) - 700.0
    found = []
    for value in (0.0, float("nan")):
        x[13] = value
        amax, bucket = torch.zeros(1), torch.zeros(701)
        factor = torch.tensor([0.5])
        triton_bucket.flatten_into(
            bucket,
            triton_bucket.BucketTable([x]),
            scale=2.0,
            device_scale=factor,
            amax=amax,
            config=config,
        )
        found.append(float(amax))
    return found[0], found[1], bool(torch.equal(bucket[14:], x[14:]))


def quantised_blocks(
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]], sizes: Sequence[tuple[int, int]]
) -> list[str]:
    """quantise and dequantise against pycoll.ops, to the bit; complaints."""
    make_interpreter_fast()
    from pycoll import ops
    from pycoll.triton_kernels import quantise

    complaints = []
    for dtype, code_dtype in dtypes:
        for numel, block in sizes:
            generator = torch.Generator().manual_seed(numel)
            values = torch.randn(numel, generator=generator)
            values *= 10.0 ** torch.randint(-4, 4, (numel,), generator=generator)
            values[: block // 2] = 0.0
            values[-1] = 1e-44
            if numel > 3 * block:
                values[2 * block] = float("inf")
            x = values.to(dtype)
            codes = guarded(torch.zeros(numel, dtype=torch.uint8).view(code_dtype))
            scales = guarded(torch.zeros(-(-numel // block)))
            quantise.quantise_blocks(x, block, code_dtype, codes=codes, scales=scales)
            output = guarded(torch.zeros_like(x))
            quantise.dequantise_blocks(codes, scales, block, dtype, output=output)
            want_codes, want_scales = ops.quantise_blocks(x, block, code_dtype)
            want = ops.dequantise_blocks(want_codes, want_scales, block, dtype)
            try:
                assert_same_bits(codes, want_codes, "codes")
                assert_same_bits(scales, want_scales, "scales", nan_payload=False)
                assert_same_bits(output, want, "elements", nan_payload=False)
                check_guards(codes)
                check_guards(scales)
                check_guards(output)
            except AssertionError as error:
                complaints.append(f"{dtype} {code_dtype} {numel} by {block}: {error}")
    return complaints
