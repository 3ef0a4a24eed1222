"""Buckets: thousands of tensors, one after another, in one flat tensor; with a scale, a cast, a sum, in one launch.

What it means is what ``pycoll.ops.flatten_into`` and ``unflatten_into`` mean, to the bit; tensors are contiguous.

The bucket is cut into tiles; a program takes a tile, finds the first tensor in it by bisection, and walks over the
tensors until the tile ends. Where source and target come to multiples of 16 bytes together, data moves in vectors from
there on; elsewhere one element at a time. A row of the table: address (0: missing), number of elements, first element
in the bucket.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pycoll.triton_kernels.elements import from_float, to_float
from pycoll.triton_kernels.launching import LaunchConfig, launch
from pycoll.triton_kernels.segments import block_of
from pycoll.triton_kernels.signals import pointer_to
from pycoll.triton_kernels.storage import (
    UNIT_BYTES,
    bytes_of,
    check_contiguous,
    float_bits,
    storage_of,
)

TILE_BYTES = 32 << 10
CONVERTIBLE = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@triton.jit
def clamped(x, KIND: tl.constexpr):
    """float8 saturates: what is finite and beyond the largest number becomes it."""
    if KIND == "float8_e4m3fn" or KIND == "float8_e5m2":
        LARGEST: tl.constexpr = 448.0 if KIND == "float8_e4m3fn" else 57344.0
        magnitude = x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
        is_beyond = (tl.abs(x) > LARGEST) & (magnitude < 0x7F800000)
        return tl.where(is_beyond, tl.where(x < 0, -LARGEST, LARGEST), x)
    else:
        return x


@triton.jit
def move(
    source,
    target,
    offsets,
    source_mask,
    mask,
    scale,
    amax,
    SOURCE_KIND: tl.constexpr,
    TARGET_KIND: tl.constexpr,
    COMPUTES: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    IS_EDGE: tl.constexpr,
):
    """Elements at `offsets`; zeros where there is no source. The largest magnitude so far, in bits. IS_EDGE: fewer
    elements than threads, so that several threads load each, and none may do so after another one has stored."""
    STORAGE: tl.constexpr = target.dtype.element_ty
    x = tl.load(source + offsets, mask=source_mask, other=0)
    if COMPUTES:
        wide = to_float(x, SOURCE_KIND)
        if HAS_AMAX:
            bits = wide.to(tl.float32).to(tl.uint32, bitcast=True) & 0x7FFFFFFF
            amax = tl.maximum(amax, tl.max(bits.to(tl.int32)))
        wide = wide * scale.to(wide.dtype)
        if ACCUMULATES:
            before = to_float(tl.load(target + offsets, mask=mask, other=0), TARGET_KIND)
            wide = before + wide.to(before.dtype)
        x = from_float(clamped(wide, TARGET_KIND), STORAGE, TARGET_KIND)
    if IS_EDGE:
        tl.debug_barrier()
    tl.store(target + offsets, x, mask=mask)
    return amax


@triton.jit
def move_run(
    source,
    target,
    numel,
    is_present,
    scale,
    amax,
    SOURCE_KIND: tl.constexpr,
    TARGET_KIND: tl.constexpr,
    COMPUTES: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`numel` elements that lie next to one another: singly until both sides are aligned, in units, and what is left
    singly."""
    SOURCE_BYTES: tl.constexpr = source.dtype.element_ty.primitive_bitwidth // 8
    TARGET_BYTES: tl.constexpr = target.dtype.element_ty.primitive_bitwidth // 8
    source_at = tl.where(is_present, source.to(tl.int64), 0)
    target_at = target.to(tl.int64)
    # A missing source is aligned wherever the target is.
    source_head = tl.where(is_present, (0 - source_at) & 15, (0 - target_at) & 15)
    if SOURCE_BYTES <= TARGET_BYTES:
        head = tl.where(is_present, source_head // SOURCE_BYTES, source_head // TARGET_BYTES)
    else:
        head = ((0 - target_at) & 15) // TARGET_BYTES
    meets = (source_at + tl.where(is_present, head, 0) * SOURCE_BYTES) & 15
    meets = meets | ((target_at + head * TARGET_BYTES) & 15)
    head = tl.minimum(tl.where(meets == 0, head, numel), numel)

    lanes = tl.arange(0, BLOCK)
    for begin in range(0, head, BLOCK):
        offsets = begin + lanes
        source_mask = offsets < tl.where(is_present, head, 0)
        amax = move(source, target, offsets, source_mask, offsets < head, scale, amax, SOURCE_KIND,
                    TARGET_KIND, COMPUTES, ACCUMULATES, HAS_AMAX, False)  # fmt: skip
    num_units = (numel - head) // UNIT
    present_units = tl.where(is_present, num_units, 0)
    aligned_source = tl.multiple_of(source + head, 16)
    aligned_target = tl.multiple_of(target + head, 16)
    for unit in range(0, num_units, BLOCK // UNIT):
        offsets, mask = block_of(unit, num_units, BLOCK, UNIT)
        _, source_mask = block_of(unit, present_units, BLOCK, UNIT)
        amax = move(aligned_source, aligned_target, offsets, source_mask, mask, scale, amax, SOURCE_KIND,
                    TARGET_KIND, COMPUTES, ACCUMULATES, HAS_AMAX, False)  # fmt: skip
    offsets = head + num_units * UNIT + tl.arange(0, UNIT)
    source_mask = offsets < tl.where(is_present, numel, 0)
    return move(source, target, offsets, source_mask, offsets < numel, scale, amax, SOURCE_KIND,
                TARGET_KIND, COMPUTES, ACCUMULATES, HAS_AMAX, True)  # fmt: skip


@triton.jit
def first_tensor(table, num_tensors, place):
    """The first tensor that ends behind `place`."""
    low = tl.cast(num_tensors, tl.int64) * 0
    high = tl.cast(num_tensors, tl.int64)
    while low < high:
        middle = (low + high) // 2
        end = tl.load(table + 3 * middle + 1) + tl.load(table + 3 * middle + 2)
        low = tl.where(end <= place, middle + 1, low)
        high = tl.where(end <= place, high, middle)
    return low


@triton.jit(do_not_specialize=["num_tensors", "bucket_numel", "scale_bits"])
def bucket_kernel(
    table,
    num_tensors,
    example,
    bucket,
    bucket_numel,
    scale_bits,
    device_scale,
    amax,
    FLATTENS: tl.constexpr,
    TENSOR_KIND: tl.constexpr,
    BUCKET_KIND: tl.constexpr,
    COMPUTES: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    HAS_DEVICE_SCALE: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of `example` only the type is used: it is that of the tensors."""
    TENSOR: tl.constexpr = example.dtype.element_ty
    SOURCE_KIND: tl.constexpr = TENSOR_KIND if FLATTENS else BUCKET_KIND
    TARGET_KIND: tl.constexpr = BUCKET_KIND if FLATTENS else TENSOR_KIND
    # A missing tensor is zeros, or nothing where they would be added.
    WRITES_ZEROS: tl.constexpr = FLATTENS and not ACCUMULATES
    scale = tl.cast(scale_bits, tl.int64).to(tl.float64, bitcast=True)
    if bucket.dtype.element_ty != tl.float64:
        scale = scale.to(tl.float32)
    if HAS_DEVICE_SCALE:
        scale = scale * tl.load(device_scale).to(scale.dtype)
    largest = tl.full((), 0, tl.int32)
    numel = tl.cast(bucket_numel, tl.int64)
    num_tiles = tl.cdiv(numel, TILE)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        begin = tl.cast(tile, tl.int64) * TILE
        end = tl.minimum(begin + TILE, numel)
        index = first_tensor(table, num_tensors, begin)
        place = begin
        while (index < num_tensors) & (place < end):
            address = tl.load(table + 3 * index)
            first = tl.load(table + 3 * index + 2)
            place = tl.maximum(first, begin)
            part = tl.minimum(first + tl.load(table + 3 * index + 1), end) - place
            tensor = pointer_to(address, TENSOR) + (place - first)
            is_present = address != 0
            if FLATTENS:
                source, target = tensor, bucket + place
            else:
                source, target = bucket + place, tensor
            if (part > 0) & (is_present | WRITES_ZEROS):
                largest = move_run(source, target, part, is_present, scale, largest, SOURCE_KIND, TARGET_KIND,
                                   COMPUTES, ACCUMULATES, HAS_AMAX, UNIT, BLOCK)  # fmt: skip
            index += 1
    if HAS_AMAX:
        tl.atomic_max(amax, largest, sem="relaxed", scope="sys")


# ---- launchers


class BucketTable:
    """Where the tensors of a bucket lie: made once, used as long as they lie there.

    Args:
        tensors: contiguous, of one dtype, on one device. None stands for one that is missing.
        numels: elements of each; needed if one is None.

    Raises:
        ValueError: dtypes, devices or numbers of elements do not fit, or no tensor is present.
    """

    def __init__(
        self, tensors: Sequence[Tensor | None], numels: Sequence[int] | None = None
    ) -> None:
        present = [tensor for tensor in tensors if tensor is not None]
        if not present:
            raise ValueError("tensors has no tensor; one must be present to tell the dtype")
        check_contiguous(
            {f"tensors[{i}]": t for i, t in enumerate(tensors) if t is not None}, present[0].device
        )
        self.numels = self._numels(tensors, numels)
        self.example = present[0]
        for i, tensor in enumerate(tensors):
            if tensor is not None and tensor.dtype != self.example.dtype:
                raise ValueError(
                    f"tensors[{i}] is of {tensor.dtype} and another one of {self.example.dtype}; "
                    "make a bucket for each dtype"
                )
        rows, begin = [], 0
        for tensor, numel in zip(tensors, self.numels, strict=True):
            rows += [0 if tensor is None else tensor.data_ptr(), numel, begin]
            begin += numel
        self.numel = begin
        self._tensors = present  # they must not move
        self.rows = torch.tensor(rows, dtype=torch.int64).to(self.example.device)

    def rows_of_parts(self, parts: int) -> Tensor:
        """With `parts` elements for each one."""
        factors = torch.tensor([1, parts, parts], device=self.rows.device)
        return self.rows * factors.repeat(len(self.numels))

    @staticmethod
    def _numels(tensors: Sequence[Tensor | None], numels: Sequence[int] | None) -> list[int]:
        if numels is not None and len(numels) != len(tensors):
            raise ValueError(
                f"tensors has {len(tensors)} entries and numels {len(numels)}; "
                "give one number for each tensor"
            )
        found = []
        for i, tensor in enumerate(tensors):
            given = None if numels is None else numels[i]
            if tensor is None and given is None:
                raise ValueError(f"tensors[{i}] is None and numels is not given; pass numels")
            if tensor is not None and given not in (None, tensor.numel()):
                raise ValueError(
                    f"tensors[{i}] has {tensor.numel()} elements, but numels[{i}] is {given}; "
                    "make them equal"
                )
            found.append(int(given) if tensor is None and given is not None else 0)
            if tensor is not None:
                found[-1] = tensor.numel()
        return found


def flatten_into(
    bucket: Tensor,
    table: BucketTable,
    *,
    scale: float = 1.0,
    device_scale: Tensor | None = None,
    accumulate: bool = False,
    amax: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> None:
    """Writes ``scale`` times the elements of all tensors, in order, to `bucket`; zeros for missing ones.

    Args:
        bucket: contiguous, with as many elements as all tensors together.
        scale: multiplies in float32 (float64 for float64). Only for floats.
        device_scale: float32, one more factor.
        accumulate: add to what the bucket holds; missing tensors leave it as it is.
        amax: float32, not negative: becomes the largest magnitude of all sources if that is larger; NaN if there is
            one.

    Raises:
        ValueError: numbers of elements, dtypes or devices do not fit.
    """
    _start(bucket, table, True, scale, device_scale, accumulate, amax, config)


def unflatten_into(
    bucket: Tensor,
    table: BucketTable,
    *,
    scale: float = 1.0,
    device_scale: Tensor | None = None,
    accumulate: bool = False,
    amax: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> None:
    """Writes ``scale`` times the elements of `bucket`, in order, to all tensors but the missing ones; as
    :func:`flatten_into`."""
    _start(bucket, table, False, scale, device_scale, accumulate, amax, config)


def _check(bucket: Tensor, table: BucketTable, computes: bool) -> None:
    check_contiguous({"bucket": bucket}, table.example.device)
    if bucket.numel() != table.numel:
        raise ValueError(
            f"bucket has {bucket.numel()} elements, but the tensors have {table.numel}; "
            "make them equal"
        )
    dtypes = {bucket.dtype, table.example.dtype}
    if computes and not dtypes <= set(CONVERTIBLE) and dtypes != {torch.float64}:
        raise ValueError(
            f"bucket is of {bucket.dtype} and the tensors of {table.example.dtype}; scale, cast and "
            "accumulate only float32, float16, bfloat16, float8_e4m3fn and float8_e5m2, or float64 alone"
        )


def _start(
    bucket: Tensor,
    table: BucketTable,
    flattens: bool,
    scale: float,
    device_scale: Tensor | None,
    accumulate: bool,
    amax: Tensor | None,
    config: LaunchConfig | None,
) -> None:
    is_same = bucket.dtype == table.example.dtype and scale == 1.0
    computes = not is_same or accumulate or device_scale is not None or amax is not None
    _check(bucket, table, computes)
    if table.numel == 0:
        return
    view = (lambda tensor: storage_of(tensor, "sum")) if computes else bytes_of
    flat, example = view(bucket), view(table.example)
    config = config or LaunchConfig()
    narrow = min(flat.itemsize, example.itemsize)
    parts = flat.tensor.numel() // table.numel  # of complex numbers, two
    rows = table.rows if parts == 1 else table.rows_of_parts(parts)
    block = config.block_numel(narrow)
    tile = max(block, TILE_BYTES // narrow)
    launch(
        bucket_kernel,
        min(-(-flat.tensor.numel() // tile), 65536),
        config.num_warps,
        table=rows,
        num_tensors=len(table.numels),
        example=example.tensor,
        bucket=flat.tensor,
        bucket_numel=flat.tensor.numel(),
        scale_bits=float_bits(scale),
        device_scale=device_scale if device_scale is not None else rows,
        amax=amax.view(torch.int32) if amax is not None else rows,
        FLATTENS=flattens,
        TENSOR_KIND=example.kind,
        BUCKET_KIND=flat.kind,
        COMPUTES=computes,
        ACCUMULATES=accumulate,
        HAS_DEVICE_SCALE=device_scale is not None,
        HAS_AMAX=amax is not None,
        UNIT=UNIT_BYTES // narrow,
        BLOCK=block,
        TILE=tile,
    )
