"""Adding up what ranks have left in slots, in rank order, inside Triton kernels."""

import triton
import triton.language as tl

from pycoll.triton_kernels.elements import combine, finished, load_term, narrow
from pycoll.triton_kernels.segments import slot_of
from pycoll.triton_kernels.signals import factor_of, pointer_to, rank_of, world_size_of


@triton.jit
def source_of(own, slots, slot_bytes, src, rank, ALIGNED: tl.constexpr):
    """Where a rank's elements lie: this rank's own in user memory, the others' in slots that follow one another."""
    dtype: tl.constexpr = own.dtype.element_ty
    address = tl.where(src == rank, own.to(tl.int64), slots + src * slot_bytes)
    pointer = pointer_to(address, dtype)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def used_factor(group, src, epoch, factor_bits, OP: tl.constexpr):
    if OP == "premul_sum":
        return factor_of(group, src, epoch, factor_bits)
    else:
        return 0


@triton.jit
def reduced(
    group,
    own,
    slots,
    slot_bytes,
    offsets,
    mask,
    epoch,
    factor_bits,
    divisor,
    KIND: tl.constexpr,
    OP: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Elements of rank 0 op elements of rank 1 op ..., as they are stored."""
    rank = rank_of(group)
    source = source_of(own, slots, slot_bytes, rank * 0, rank, ALIGNED)
    factor = used_factor(group, rank * 0, epoch, factor_bits, OP)
    a, a2 = load_term(source, offsets, mask, factor, KIND, OP)
    for src in range(1, world_size_of(group)):
        source = source_of(own, slots, slot_bytes, src, rank, ALIGNED)
        factor = used_factor(group, src, epoch, factor_bits, OP)
        b, b2 = load_term(source, offsets, mask, factor, KIND, OP)
        a, a2 = combine(a, a2, b, b2, offsets, KIND, OP)
    return narrow(finished(a, a2, divisor, KIND, OP), own.dtype.element_ty, KIND)


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
    lanes = tl.arange(0, BLOCK)
    num_units = numel // UNIT
    for unit in range(first_unit, num_units, stride_units):
        offsets = unit * UNIT + lanes
        mask = unit + lanes // UNIT < num_units
        result = reduced(
            group,
            own,
            slots,
            slot_bytes,
            offsets,
            mask,
            epoch,
            factor_bits,
            divisor,
            KIND,
            OP,
            ALIGNED,
        )
        tl.store(output + offsets, result, mask=mask)
        if HANDS_OUT:
            hand_out(group, 1, slot_units, offsets, result, mask)
    offsets = num_units * UNIT + tl.arange(0, UNIT)
    mask = offsets < tl.where(first_unit == 0, numel, 0)
    result = reduced(
        group, own, slots, slot_bytes, offsets, mask, epoch, factor_bits, divisor, KIND, OP, ALIGNED
    )
    # Fewer elements than threads: several threads load each. None may do so after another one has stored in the same
    # place.
    tl.debug_barrier()
    tl.store(output + offsets, result, mask=mask)
    if HANDS_OUT:
        hand_out(group, 1, slot_units, offsets, result, mask)
