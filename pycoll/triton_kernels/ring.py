"""Lanes of a ring and what a rank does in a step, inside Triton kernels (csrc/kernels/cuda/ring.cuh has the prose).

A lane from a rank to the next one has RING_SLOTS slots in the next one's memory, and two counters. Tail: slots filled,
raised in the receiver's memory after the data. Head: slots read, raised in the sender's memory after the last load.
Both hold the epoch in their upper half. Partial sums travel in the type in which they are added, results as they are
stored.
"""

import triton
import triton.language as tl

from pycoll.triton_kernels.elements import combine, finished, load_term, narrow
from pycoll.triton_kernels.segments import UNIT_BYTES, block_of, edge_of
from pycoll.triton_kernels.signals import (
    MAX_BLOCKS,
    PHASE_RING_RECEIVE,
    PHASE_RING_SEND,
    RING_SIGNALS,
    SLOTS,
    aligned_pointer_to,
    memory_of,
    pointer_to,
    rank_of,
    signal_value,
    wait_reached,
    world_size_of,
)

RING_SLOTS = tl.constexpr(4)
# Partial sums take up to so many times the room of the elements.
MAX_WIDENING = tl.constexpr(4)


@triton.jit
def next_rank(group):
    return (rank_of(group) + 1) % world_size_of(group)


@triton.jit
def previous_rank(group):
    world_size = world_size_of(group)
    return (rank_of(group) + world_size - 1) % world_size


@triton.jit
def ring_slot(group, owner, step, slot_units):
    """The address of the slot of `owner` that takes this block's data of a step."""
    index = (tl.program_id(0) * RING_SLOTS + step % RING_SLOTS).to(tl.int64)
    return memory_of(group, SLOTS, owner) + index * slot_units * (UNIT_BYTES * MAX_WIDENING)


@triton.jit
def tail_of(group, owner):
    return pointer_to(memory_of(group, RING_SIGNALS, owner), tl.int64) + tl.program_id(0)


@triton.jit
def head_of(group, owner):
    return tail_of(group, owner) + MAX_BLOCKS


@triton.jit
def begin_step(group, epoch, num_sent, num_received, receives, sends, goes_on):
    """Until there is something to receive, and room for what is sent."""
    rank = rank_of(group)
    if receives:
        goes_on = wait_reached(
            group,
            tail_of(group, rank),
            signal_value(epoch, num_received + 1),
            PHASE_RING_RECEIVE,
            previous_rank(group),
            goes_on,
        )
    free = tl.where(sends & (num_sent >= RING_SLOTS), num_sent - RING_SLOTS + 1, 0)
    if free > 0:
        goes_on = wait_reached(
            group,
            head_of(group, rank),
            signal_value(epoch, free),
            PHASE_RING_SEND,
            next_rank(group),
            goes_on,
        )
    return goes_on


@triton.jit
def end_step(group, epoch, num_sent, num_received, receives, sends, goes_on):
    """Tells both neighbours; the counters afterwards."""
    num_sent += sends.to(tl.int32)
    num_received += receives.to(tl.int32)
    tl.debug_barrier()
    if goes_on:
        if sends:
            tail = tail_of(group, next_rank(group))
            tl.atomic_xchg(tail, signal_value(epoch, num_sent), sem="release", scope="sys")
        if receives:
            head = head_of(group, previous_rank(group))
            tl.atomic_xchg(head, signal_value(epoch, num_received), sem="release", scope="sys")
    return num_sent, num_received


# ---- one block of elements of a step


@triton.jit
def reduce_block(
    input,
    output,
    slot_in,
    slot_out,
    offsets,
    mask,
    factor,
    divisor,
    plane_numel,
    sent_mask,
    KIND: tl.constexpr,
    OP: tl.constexpr,
    RECEIVES: tl.constexpr,
    COMPLETES: tl.constexpr,
    IS_EDGE: tl.constexpr,
):
    """`sent_mask`: of what goes on to the next rank when the chunk is complete. IS_EDGE: as of
    reduction.reduce_elements."""
    STORAGE: tl.constexpr = input.dtype.element_ty
    IS_WIDE: tl.constexpr = KIND == "integer" and OP == "avg" and STORAGE.primitive_bitwidth == 64
    a, a2 = load_term(input, offsets, mask, factor, KIND, OP)
    if RECEIVES:
        wire = aligned_pointer_to(slot_in, a.dtype)
        b = tl.load(wire + offsets, mask=mask)
        b2 = a2
        if KIND == "complex":
            b2 = tl.load(wire + (offsets ^ 1), mask=mask)
        elif IS_WIDE:
            upper = aligned_pointer_to(slot_in, tl.int64) + plane_numel
            b2 = tl.load(upper + offsets, mask=mask)
        a, a2 = combine(b, b2, a, a2, offsets, KIND, OP)
    if COMPLETES:
        result = narrow(finished(a, a2, divisor, KIND, OP), STORAGE, KIND)
        if IS_EDGE:
            tl.debug_barrier()
        tl.store(output + offsets, result, mask=mask)
        target = aligned_pointer_to(slot_out, STORAGE)
        tl.store(target + offsets, result, mask=sent_mask)
    else:
        target = aligned_pointer_to(slot_out, a.dtype)
        tl.store(target + offsets, a, mask=mask)
        if IS_WIDE:
            upper = aligned_pointer_to(slot_out, tl.int64) + plane_numel
            tl.store(upper + offsets, a2, mask=mask)


@triton.jit
def reduce_step(
    input,
    output,
    numel,
    slot_in,
    slot_out,
    factor,
    divisor,
    plane_numel,
    sends,
    KIND: tl.constexpr,
    OP: tl.constexpr,
    RECEIVES: tl.constexpr,
    COMPLETES: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A step on the way to the sum of a chunk, of which `numel` elements are this block's."""
    num_units = numel // UNIT
    sent_units = tl.where(sends, num_units, 0)
    for unit in range(0, num_units, BLOCK // UNIT):
        offsets, mask = block_of(unit, num_units, BLOCK, UNIT)
        _, sent_mask = block_of(unit, sent_units, BLOCK, UNIT)
        reduce_block(input, output, slot_in, slot_out, offsets, mask, factor, divisor, plane_numel, sent_mask,
                     KIND, OP, RECEIVES, COMPLETES, False)  # fmt: skip
    offsets, mask = edge_of(numel, 0, UNIT)
    sent_mask = offsets < tl.where(sends, numel, 0)
    reduce_block(input, output, slot_in, slot_out, offsets, mask, factor, divisor, plane_numel, sent_mask,
                 KIND, OP, RECEIVES, COMPLETES, True)  # fmt: skip


@triton.jit
def hand_on(output, numel, slot_in, slot_out, sends, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """A step that brings a finished chunk: to the output, and on to the next rank."""
    STORAGE: tl.constexpr = output.dtype.element_ty
    source = aligned_pointer_to(slot_in, STORAGE)
    target = aligned_pointer_to(slot_out, STORAGE)
    num_units = numel // UNIT
    sent_units = tl.where(sends, num_units, 0)
    for unit in range(0, num_units, BLOCK // UNIT):
        offsets, mask = block_of(unit, num_units, BLOCK, UNIT)
        _, sent_mask = block_of(unit, sent_units, BLOCK, UNIT)
        x = tl.load(source + offsets, mask=mask)
        tl.store(output + offsets, x, mask=mask)
        tl.store(target + offsets, x, mask=sent_mask)
    offsets, mask = edge_of(numel, 0, UNIT)
    x = tl.load(source + offsets, mask=mask)
    tl.store(output + offsets, x, mask=mask)
    tl.store(target + offsets, x, mask=offsets < tl.where(sends, numel, 0))


@triton.jit
def ring_step(
    input,
    output,
    numel,
    slot_in,
    slot_out,
    factor,
    divisor,
    plane_numel,
    step,
    world_size,
    sends,
    KIND: tl.constexpr,
    OP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What a rank does in a step of all_reduce: it starts a chunk, adds to one, completes its own, or hands one on."""
    if step >= world_size:
        hand_on(output, numel, slot_in, slot_out, sends, UNIT, BLOCK)
    elif step > 0:
        if step == world_size - 1:
            reduce_step(input, output, numel, slot_in, slot_out, factor, divisor, plane_numel, sends,
                        KIND, OP, True, True, UNIT, BLOCK)  # fmt: skip
        else:
            reduce_step(input, output, numel, slot_in, slot_out, factor, divisor, plane_numel, sends,
                        KIND, OP, True, False, UNIT, BLOCK)  # fmt: skip
    else:
        if world_size > 1:
            reduce_step(input, output, numel, slot_in, slot_out, factor, divisor, plane_numel, sends,
                        KIND, OP, False, False, UNIT, BLOCK)  # fmt: skip
        else:
            reduce_step(input, output, numel, slot_in, slot_out, factor, divisor, plane_numel, sends,
                        KIND, OP, False, True, UNIT, BLOCK)  # fmt: skip
