"""Buckets and block-wise quantisation on tensors: values, guard bytes, strides, every dtype.

The oracle is torch's own arithmetic, element for element, and pycoll.reference. That all instruction
sets agree is tested in tests/native/test_bucket.cpp and test_quantise.cpp. Every test runs with the CPU's
kernels and with simulated CUDA kernels.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from checker import assert_same_bits
from quantisation_data import KINDS, hard_values
from torch import Tensor

from pycoll import ops, reference
from pycoll.testing import check_guards, guarded

pytestmark = pytest.mark.usefixtures("operator_kernels")

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *FLOAT8)
CODE_DTYPES = (*FLOAT8, torch.int8)
SHAPES = ((7,), (0,), (13, 5), (), (3, 0, 2), (1021,), (2, 3, 101), (1,))


def saturating(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The cast of a bucket: torch's, but float8 saturates."""
    if dtype in FLOAT8:
        largest = reference.LARGEST_CODE[dtype]
        x = torch.where(x.isfinite(), x.clamp(-largest, largest), x)
    return x.to(dtype)


def make_tensors(dtype: torch.dtype, *, strided: bool = False) -> list[Tensor]:
    """Tensors of many shapes between guards; every other one, if asked, with its dimensions reversed in memory."""
    tensors = []
    for index, shape in enumerate(SHAPES):
        numel = torch.Size(shape).numel()
        values = saturating(hard_values("random", numel, index), dtype).view(shape)
        strides = None
        if strided and index % 2 == 0:
            strides = torch.empty(shape[::-1], device="meta").stride()[::-1]
            strides = tuple(3 * stride for stride in strides)
        tensors.append(guarded(values, strides=strides, offset_bytes=dtype.itemsize))
    return tensors


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).view(-1).contiguous() for tensor in tensors])


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("source", "target"), [*itertools.product(CAST_DTYPES, CAST_DTYPES)], ids=lambda d: str(d)[6:]
)
def test_every_cast(source: torch.dtype, target: torch.dtype, strided: bool) -> None:
    tensors = make_tensors(source, strided=strided)
    for scale in (1.0, 0.37):
        bucket = ops.flatten(tensors, dtype=target, scale=scale)
        wide = torch.cat([t.float().reshape(-1) for t in tensors]) * scale
        assert bucket.shape == wide.shape
        assert_same_bits(bucket, saturating(wide, target), "flatten")
        # And back, beside what is there.
        outputs = make_tensors(source, strided=strided)
        ops.unflatten_into(bucket, outputs, scale=scale, accumulate=True)
        pieces = bucket.float().split([t.numel() for t in tensors])
        for output, present, piece in zip(outputs, tensors, pieces, strict=True):
            want = present.float() + piece.view(present.shape) * scale
            assert_same_bits(output.contiguous(), saturating(want, source), "unflatten")
            check_guards(output)
    for tensor in tensors:
        check_guards(tensor)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", CAST_DTYPES, ids=lambda d: str(d)[6:])
def test_absent_tensors_are_zeros(dtype: torch.dtype, accumulate: bool) -> None:
    tensors = make_tensors(torch.float32)
    numels = [t.numel() for t in tensors]
    some = [None if i in (0, 1, 5, 7) else t for i, t in enumerate(tensors)]
    before = saturating(hard_values("random", sum(numels), 99), dtype)
    bucket = guarded(before, offset_bytes=dtype.itemsize)
    ops.flatten_into(bucket, some, numels=numels, accumulate=accumulate)
    parts = []
    for tensor, there in zip(some, before.split(numels), strict=True):
        values = torch.zeros(there.shape) if tensor is None else tensor.reshape(-1)
        if accumulate and tensor is None:
            parts.append(there)
        else:
            parts.append(saturating(there.float() + values if accumulate else values, dtype))
    assert_same_bits(bucket.contiguous(), flat(parts), "flatten_into")
    check_guards(bucket)
    # What is absent is left out on the way back.
    outputs = [None if t is None else torch.full_like(t, 7) for t in some]
    ops.unflatten_into(bucket, outputs, numels=numels)
    for output, piece in zip(outputs, bucket.split(numels), strict=True):
        assert output is None or torch.equal(output.reshape(-1), piece.float())


@pytest.mark.parametrize("scale", [-0.5, float("inf"), float("nan")])
def test_absent_tensors_are_zeros_whatever_the_scale(scale: float) -> None:
    for dtype in CAST_DTYPES:
        bucket = ops.flatten([None, torch.ones(7)], numels=[67, 7], dtype=dtype, scale=scale)
        assert not bytes_of(bucket[:67]).any(), "a zero with a sign, or no zero"
        codes, _ = ops.flatten_quantised(
            [None, torch.ones(7)], numels=[67, 7], block=67, scale=scale
        )
        assert not bytes_of(codes[:67]).any()


OTHER_DTYPES = [
    *reference.INTEGER_DTYPES,
    *reference.COMPLEX_DTYPES,
    torch.bool,
    torch.float64,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=lambda d: str(d)[6:])
def test_other_dtypes_are_moved(dtype: torch.dtype) -> None:
    def pattern(numel: int, seed: int) -> Tensor:
        raw = (torch.arange(numel * dtype.itemsize) * 31 + seed * 17) % 251
        raw = raw % 2 if dtype == torch.bool else raw
        return raw.to(torch.uint8).view(dtype)

    tensors = [guarded(pattern(numel, i)) for i, numel in enumerate((5, 0, 127, 1031))]
    bucket = ops.flatten(tensors)
    assert torch.equal(bytes_of(bucket), torch.cat([bytes_of(t) for t in tensors]))
    pieces = ops.unflatten(bucket, [t.shape for t in tensors])
    for piece, tensor in zip(pieces, tensors, strict=True):
        assert torch.equal(bytes_of(piece), bytes_of(tensor))
        check_guards(tensor)


def test_float64_computes_in_float64() -> None:
    a, b = torch.randn(3, dtype=torch.float64), torch.randn(1031, dtype=torch.float64)
    bucket = torch.randn(1034, dtype=torch.float64)
    want = bucket + torch.cat([a, b]) * 0.1
    ops.flatten_into(bucket, [a, b], scale=0.1, accumulate=True)
    assert torch.equal(bucket, want)


def test_thousands_of_tensors() -> None:
    sizes = [(i * 7919) % 61 for i in range(5003)]
    tensors = [torch.arange(numel) * 3.0 + i for i, numel in enumerate(sizes)]
    bucket = ops.flatten(tensors)
    assert torch.equal(bucket, torch.cat(tensors))
    outputs = [torch.empty(numel) for numel in sizes]
    ops.unflatten_into(bucket, outputs)
    assert all(torch.equal(x, y) for x, y in zip(outputs, tensors, strict=True))


def test_parts_of_the_bucket_stay_where_they_are() -> None:
    bucket = torch.arange(30.0)
    views = [bucket[:10], torch.full((7,), -1.0), bucket[17:].view(13, 1)]
    want = torch.cat([bucket[:10], torch.full((7,), -1.0), bucket[17:]])
    ops.flatten_into(bucket, views)
    assert torch.equal(bucket, want)
    ops.unflatten_into(bucket, views)
    assert torch.equal(bucket, want)


# --- quantisation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", CODE_DTYPES, ids=lambda d: str(d)[6:])
def test_codes_are_those_of_the_reference_and_within_the_bound(
    dtype: torch.dtype, kind: str
) -> None:
    for numel, block in ((0, 128), (1, 128), (127, 31), (1031, 128), (2999, 1024), (2999, 1301)):
        x = guarded(hard_values(kind, numel))
        codes, scales = ops.quantise_blocks(x, block, dtype)
        want_codes, want_scales = reference.quantise_blocks(x, block, dtype)
        assert torch.equal(bytes_of(codes), bytes_of(want_codes)), (numel, block)
        assert_same_bits(scales, want_scales, "scales")
        back = ops.dequantise_blocks(codes, scales, block)
        assert_same_bits(back, reference.dequantise_blocks(codes, scales, block), "dequantised")
        error = (back.double() - x.double()).abs()
        assert (error <= reference.quantisation_bound(x, scales, block, dtype)).all()
        check_guards(x)


@pytest.mark.parametrize("dtype", CODE_DTYPES, ids=lambda d: str(d)[6:])
def test_the_bound_is_not_generous(dtype: torch.dtype) -> None:
    """A bound that nothing reaches would catch nothing: some element errs by nine tenths of it."""
    x = hard_values("random", 100_003)
    codes, scales = ops.quantise_blocks(x, 128, dtype)
    error = (ops.dequantise_blocks(codes, scales).double() - x.double()).abs()
    bound = reference.quantisation_bound(x, scales, 128, dtype)
    assert (error <= bound).all()
    assert (error >= 0.9 * bound).any()
    # And the check sees codes that are rounded toward zero instead.
    truncated = (x / scales.repeat_interleave(128)[: x.numel()]).trunc()
    error = (truncated * scales.repeat_interleave(128)[: x.numel()] - x).abs()
    assert (error > bound).any()


@pytest.mark.parametrize("dtype", CODE_DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_block_only(dtype: torch.dtype, poison: float) -> None:
    x = hard_values("random", 391)
    x[200] = poison
    codes, scales = ops.quantise_blocks(x, 128, dtype)
    back = ops.dequantise_blocks(codes, scales, 128)
    spoilt = torch.arange(391) // 128 == 1
    assert torch.equal(back.isnan(), spoilt)
    assert scales.isnan().tolist() == [False, True, False, False]
    assert (codes[spoilt].float() == 0).all()


@pytest.mark.parametrize("storage", CAST_DTYPES, ids=lambda d: str(d)[6:])
def test_other_storage_and_strides(storage: torch.dtype) -> None:
    values = saturating(hard_values("alternating", 2 * 509), storage).view(2, 509)
    x = guarded(values, strides=(2, 4))
    for dtype in CODE_DTYPES:
        codes, scales = ops.quantise_blocks(x, 37, dtype)
        assert codes.shape == x.shape
        want_codes, want_scales = reference.quantise_blocks(values, 37, dtype)
        assert torch.equal(bytes_of(codes), bytes_of(want_codes))
        assert_same_bits(scales, want_scales, "scales")
        back = ops.dequantise_blocks(codes.t().contiguous().t(), scales, 37, storage)
        want = reference.dequantise_blocks(codes, scales, 37)
        assert_same_bits(back, saturating(want, storage), "dequantised")
    check_guards(x)


@pytest.mark.parametrize("block", [1, 53, 128, 1024, 4001, None])
@pytest.mark.parametrize("dtype", CODE_DTYPES, ids=lambda d: str(d)[6:])
def test_a_quantised_bucket(dtype: torch.dtype, block: int | None) -> None:
    tensors: list[Tensor | None] = list(make_tensors(torch.bfloat16, strided=True))
    numels = [t.numel() for t in tensors if t is not None]
    tensors[3] = tensors[6] = None
    codes, scales = ops.flatten_quantised(
        tensors, numels=numels, block=block, dtype=dtype, scale=0.5
    )
    bucket = ops.flatten(tensors, numels=numels, dtype=torch.float32, scale=0.5)
    want = torch.empty(0)
    if block is None:
        assert len(scales) == len(tensors)
        parts = zip(codes.split(numels), scales, bucket.split(numels), strict=True)
        for part, scale, values in parts:
            want_codes, want_scale = reference.quantise_blocks(values, max(len(values), 1), dtype)
            assert torch.equal(bytes_of(part), bytes_of(want_codes))
            assert len(values) == 0 or torch.equal(scale, want_scale[0])
            want = torch.cat([want, part.float() * scale])
    else:
        want_codes, want_scales = reference.quantise_blocks(bucket, block, dtype)
        assert torch.equal(bytes_of(codes), bytes_of(want_codes))
        assert_same_bits(scales, want_scales, "scales")
        want = reference.dequantise_blocks(codes, scales, block)
    outputs = [None if t is None else torch.ones(t.shape) for t in tensors]
    ops.unflatten_quantised_into(
        codes, scales, outputs, numels=numels, block=block, scale=2.0, accumulate=True
    )
    for output, piece in zip(outputs, want.split(numels), strict=True):
        assert output is None or torch.equal(output.reshape(-1), 1 + piece * 2.0)
