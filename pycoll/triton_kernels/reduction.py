"""Adding up what ranks have left in slots, in rank order, inside Triton kernels."""

import triton
import triton.language as tl

from pycoll.triton_kernels.elements import combine, finished, load_term, narrow
from pycoll.triton_kernels.segments import block_of, edge_of, slot_of
from pycoll.triton_kernels.signals import (
    aligned_pointer_to,
    factor_of,
    pointer_to,
    rank_of,
    world_size_of,
)


@triton.jit
def source_of(own, slots, slot_bytes, src, rank, ALIGNED: tl.constexpr):
    """Where a rank's elements lie: this rank's own in user memory, the others' in slots that follow one another."""
    dtype: tl.constexpr = own.dtype.element_ty
    address = tl.where(src == rank, own.to(tl.int64), slots + src * slot_bytes)
    if ALIGNED:
        return aligned_pointer_to(address, dtype)
    else:
        return pointer_to(address, dtype)


@triton.jit
def used_factor(group, src, epoch, factor_bits, OP: tl.constexpr):
    if OP == "premul_sum":
        return factor_of(group, src, epoch, factor_bits)
    else:
        return 0


@triton.jit
def hand_out(group, area, slot_units, offsets, result, mask):
    """Stores results to this rank's slot of every other one."""
    rank = rank_of(group)
    world_size = world_size_of(group)
    for distance in range(1, world_size):
        dst = (rank + distance) % world_size
        slot = slot_of(group, area, dst, rank, slot_units, result.dtype)
        tl.store(slot + offsets, result, mask=mask)


@triton.jit
def reduce_elements(
    group,
    output,
    own,
    slots,
    slot_bytes,
    offsets,
    mask,
    epoch,
    factor_bits,
    divisor,
    slot_units,
    KIND: tl.constexpr,
    OP: tl.constexpr,
    ALIGNED: tl.constexpr,
    HANDS_OUT: tl.constexpr,
    IS_EDGE: tl.constexpr,
):
    """Elements of rank 0 op elements of rank 1 op ..., as they are stored, to the output. HANDS_OUT: also to slots of
    area 1 of all ranks. IS_EDGE: fewer elements than threads, so that several threads load each, and none may do so
    after another one has stored in the same place."""
    rank = rank_of(group)
    source = source_of(own, slots, slot_bytes, rank * 0, rank, ALIGNED)
    factor = used_factor(group, rank * 0, epoch, factor_bits, OP)
    a, a2 = load_term(source, offsets, mask, factor, KIND, OP)
    for src in range(1, world_size_of(group)):
        source = source_of(own, slots, slot_bytes, src, rank, ALIGNED)
        factor = used_factor(group, src, epoch, factor_bits, OP)
        b, b2 = load_term(source, offsets, mask, factor, KIND, OP)
        a, a2 = combine(a, a2, b, b2, offsets, KIND, OP)
    result = narrow(finished(a, a2, divisor, KIND, OP), own.dtype.element_ty, KIND)
    if IS_EDGE:
        tl.debug_barrier()
    tl.store(output + offsets, result, mask=mask)
    if HANDS_OUT:
        hand_out(group, 1, slot_units, offsets, result, mask)


@triton.jit
def reduce_run(
    group,
    output,
    own,
    slots,
    slot_bytes,
    numel,
    first_unit,
    stride_units,
    epoch,
    factor_bits,
    divisor,
    slot_units,
    KIND: tl.constexpr,
    OP: tl.constexpr,
    ALIGNED: tl.constexpr,
    HANDS_OUT: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduces elements [0, numel), shared out as `copy` does. HANDS_OUT: results also go to slots of area 1 of all
    ranks."""
    num_units = numel // UNIT
    for unit in range(first_unit, num_units, stride_units):
        offsets, mask = block_of(unit, num_units, BLOCK, UNIT)
        reduce_elements(group, output, own, slots, slot_bytes, offsets, mask, epoch, factor_bits, divisor, slot_units,
                        KIND, OP, ALIGNED, HANDS_OUT, False)  # fmt: skip
    offsets, mask = edge_of(numel, first_unit, UNIT)
    reduce_elements(group, output, own, slots, slot_bytes, offsets, mask, epoch, factor_bits, divisor, slot_units,
                    KIND, OP, ALIGNED, HANDS_OUT, True)  # fmt: skip
