"""all_reduce along a ring: a reduce-scatter of n steps, then n - 1 steps that hand the results around
(csrc/topology/ring.h).

Additions follow the ring and not the ranks, so bits differ from those of one-shot and two-shot; by explicit choice
only.
"""

import triton
import triton.language as tl

from pycoll.triton_kernels.arguments import Reduction, launch_by_slots
from pycoll.triton_kernels.ring import (
    begin_step,
    end_step,
    next_rank,
    ring_slot,
    ring_step,
)
from pycoll.triton_kernels.segments import num_iterations, part_of
from pycoll.triton_kernels.signals import begin_epoch, end_epoch, rank_of, world_size_of


@triton.jit(do_not_specialize=["numel", "fingerprint", "factor_bits", "divisor", "slot_units"])
def all_reduce_ring_kernel(
    group,
    input,
    output,
    numel,
    fingerprint,
    factor_bits,
    divisor,
    slot_units,
    KIND: tl.constexpr,
    OP: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    numel = tl.cast(numel, tl.int64)
    slot_units = tl.cast(slot_units, tl.int64)
    rank = rank_of(group)
    world_size = world_size_of(group)
    factor = tl.cast(factor_bits, tl.int64).to(tl.float64, bitcast=True)
    epoch, goes_on = begin_epoch(group, fingerprint, factor_bits)
    num_units = tl.cdiv(numel, UNIT)
    num_sent = tl.full((), 0, tl.int32)
    num_received = tl.full((), 0, tl.int32)
    for iteration in range(num_iterations(tl.cdiv(num_units, world_size), slot_units)):
        for index in range(2 * world_size - 1):
            step = tl.cast(index, tl.int32)
            receives = step > 0
            sends = step + 2 < 2 * world_size
            chunk = (rank + 2 * world_size - 1 - step) % world_size
            begin, part = part_of(num_units, numel, chunk, world_size, slot_units, iteration, UNIT)
            slot_in = ring_slot(group, rank, num_received, slot_units)
            slot_out = ring_slot(group, next_rank(group), num_sent, slot_units)
            goes_on = begin_step(group, epoch, num_sent, num_received, receives, sends, goes_on)
            if goes_on:
                ring_step(input + begin, output + begin, part, slot_in, slot_out, factor, divisor, slot_units * UNIT,
                          step, world_size, sends, KIND, OP, UNIT, BLOCK)  # fmt: skip
            num_sent, num_received = end_step(
                group, epoch, num_sent, num_received, receives, sends, goes_on
            )
    end_epoch(group, epoch, goes_on)


def start_ring(call: Reduction) -> None:
    group, source = call.group, call.source
    numel = source.tensor.numel()
    launch_by_slots(
        all_reduce_ring_kernel,
        group.layout,
        -(-numel // (source.unit_numel * group.world_size)),
        **call.arguments("all_reduce_ring", numel),
        numel=numel,
    )
