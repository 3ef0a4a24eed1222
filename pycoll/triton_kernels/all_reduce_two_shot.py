"""all_reduce in two steps: each rank adds up its chunk in rank order, then hands the result to all.

The protocol is that of the CUDA kernel of the same name: two areas of slots, each half acknowledged by the signal of
the other.
"""

import triton
import triton.language as tl

from pycoll.triton_kernels.arguments import Reduction, launch_by_slots
from pycoll.triton_kernels.reduction import reduce_run
from pycoll.triton_kernels.segments import (
    UNIT_BYTES,
    copy_segment,
    num_iterations,
    part_of,
    slot_of,
)
from pycoll.triton_kernels.signals import (
    PHASE_DIRECT_IN,
    PHASE_DIRECT_OUT,
    begin_epoch,
    end_epoch,
    post_all,
    rank_of,
    wait_all,
    world_size_of,
)

AREA_IN = tl.constexpr(0)
AREA_OUT = tl.constexpr(1)


@triton.jit(do_not_specialize=["numel", "fingerprint", "factor_bits", "divisor", "slot_units"])
def all_reduce_two_shot_kernel(
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
    ALIGNED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = input.dtype.element_ty
    numel = tl.cast(numel, tl.int64)
    slot_units = tl.cast(slot_units, tl.int64)
    rank = rank_of(group)
    world_size = world_size_of(group)
    epoch, goes_on = begin_epoch(group, fingerprint, factor_bits)

    num_units = tl.cdiv(numel, UNIT)
    for iteration in range(num_iterations(tl.cdiv(num_units, world_size), slot_units)):
        if goes_on:
            for distance in range(1, world_size):
                dst = (rank + distance) % world_size
                begin, part = part_of(
                    num_units, numel, dst, world_size, slot_units, iteration, UNIT
                )
                slot = slot_of(group, AREA_IN, dst, rank, slot_units, dtype)
                copy_segment(slot, input + begin, part, BLOCK, UNIT)
        post_all(group, AREA_IN, epoch, iteration + 1, goes_on)
        goes_on = wait_all(group, AREA_IN, epoch, iteration + 1, PHASE_DIRECT_IN, goes_on)

        if goes_on:
            begin, part = part_of(num_units, numel, rank, world_size, slot_units, iteration, UNIT)
            slots = slot_of(group, AREA_IN, rank, 0, slot_units, dtype).to(tl.int64)
            reduce_run(group, output + begin, input + begin, slots, slot_units * UNIT_BYTES, part, 0, BLOCK // UNIT,
                       epoch, factor_bits, divisor, slot_units, KIND, OP, ALIGNED, True, UNIT, BLOCK)  # fmt: skip
        post_all(group, AREA_OUT, epoch, iteration + 1, goes_on)
        goes_on = wait_all(group, AREA_OUT, epoch, iteration + 1, PHASE_DIRECT_OUT, goes_on)

        if goes_on:
            for distance in range(1, world_size):
                src = (rank + distance) % world_size
                begin, part = part_of(
                    num_units, numel, src, world_size, slot_units, iteration, UNIT
                )
                slot = slot_of(group, AREA_OUT, rank, src, slot_units, dtype)
                copy_segment(output + begin, slot, part, BLOCK, UNIT)
    end_epoch(group, epoch, goes_on)


def start_two_shot(call: Reduction) -> None:
    group, source = call.group, call.source
    numel = source.tensor.numel()
    launch_by_slots(
        all_reduce_two_shot_kernel,
        group.layout,
        -(-numel // (source.unit_numel * group.world_size)),
        **call.arguments("all_reduce_two_shot", numel),
        numel=numel,
        ALIGNED=source.is_aligned,
    )
