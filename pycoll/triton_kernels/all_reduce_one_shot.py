"""all_reduce in one step: every rank sends all of its data to every rank, and adds up all that it gets.

A mailbox has two places, by the parity of the epoch, for each source. Nobody waits before it sends: a rank writes a
place in epoch k that its owner read in epoch k - 2, in a kernel that had ended before the owner came to k - 1, where
this rank has met it. (Every kernel meets all ranks, so that holds whatever k - 1 was.) The entry of the meeting
travels with the data, and nothing is written to the output before all fingerprints have been compared.

The CUDA kernel sends a flag with every 4 bytes instead; here one signal a block says that its part is there.
"""

import triton
import triton.language as tl

from pycoll.triton_kernels.arguments import Reduction, num_blocks_for
from pycoll.triton_kernels.launching import launch
from pycoll.triton_kernels.reduction import reduce_run
from pycoll.triton_kernels.segments import UNIT_BYTES, copy
from pycoll.triton_kernels.signals import (
    MAILBOXES,
    PHASE_ONE_SHOT,
    aligned_pointer_to,
    end_epoch,
    is_going_on,
    meet_all,
    memory_of,
    next_epoch,
    post_all,
    rank_of,
    send_entries,
    wait_all,
    world_size_of,
)

AREA = tl.constexpr(0)


@triton.jit
def mailbox_of(group, epoch, owner, src, capacity_units):
    place = ((epoch & 1) * world_size_of(group) + src).to(tl.int64)
    return memory_of(group, MAILBOXES, owner) + place * capacity_units * UNIT_BYTES


@triton.jit(do_not_specialize=["numel", "fingerprint", "factor_bits", "divisor", "capacity_units"])
def all_reduce_one_shot_kernel(
    group,
    input,
    output,
    numel,
    fingerprint,
    factor_bits,
    divisor,
    capacity_units,
    KIND: tl.constexpr,
    OP: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = input.dtype.element_ty
    numel = tl.cast(numel, tl.int64)
    capacity_units = tl.cast(capacity_units, tl.int64)
    rank = rank_of(group)
    world_size = world_size_of(group)
    # Blocks take turns; a block gets what blocks of its number have sent.
    first_unit = tl.program_id(0).to(tl.int64) * (BLOCK // UNIT)
    stride_units = tl.num_programs(0).to(tl.int64) * (BLOCK // UNIT)
    epoch = next_epoch(group)
    goes_on = is_going_on(group)
    if goes_on:
        send_entries(group, epoch, fingerprint, factor_bits)
        for distance in range(1, world_size):
            dst = (rank + distance) % world_size
            mailbox = mailbox_of(group, epoch, dst, rank, capacity_units)
            mailbox = aligned_pointer_to(mailbox, dtype)
            copy(mailbox, input, numel, first_unit, stride_units, BLOCK, UNIT)
    post_all(group, AREA, epoch, 1, goes_on)
    goes_on = meet_all(group, epoch, fingerprint, goes_on)
    goes_on = wait_all(group, AREA, epoch, 1, PHASE_ONE_SHOT, goes_on)
    if goes_on:
        reduce_run(group, output, input, mailbox_of(group, epoch, rank, 0, capacity_units),
                   capacity_units * UNIT_BYTES, numel, first_unit, stride_units, epoch, factor_bits, divisor, 0,
                   KIND, OP, ALIGNED, False, UNIT, BLOCK)  # fmt: skip
    end_epoch(group, epoch, goes_on)


def start_one_shot(call: Reduction) -> None:
    """Of data that fits the group's mailboxes."""
    group, source = call.group, call.source
    numel = source.tensor.numel()
    shape = call.arguments("all_reduce_one_shot", numel)
    block_units = shape["BLOCK"] // shape["UNIT"]
    launch(
        all_reduce_one_shot_kernel,
        num_blocks_for(group.layout, -(-numel // source.unit_numel), block_units),
        group.layout.config.num_warps,
        **shape,
        numel=numel,
        capacity_units=group.layout.mailbox_units,
        ALIGNED=source.is_aligned,
    )
