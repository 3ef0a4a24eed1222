"""reduce_scatter in one step: each rank gets everybody's part of its chunk, and adds up in rank order.

`chunks` has, for each rank, the first element of its chunk in the input, then for each rank the number of its
elements; equal on all ranks. Two slots in turn, without acknowledgement: a rank writes segment j + 2 over segment j
after it has seen the slot's owner post j + 1, which that one does after it has read segment j.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from pycoll.triton_kernels.arguments import (
    Reduction,
    check,
    chunks_are_aligned,
    launch_by_slots,
    numels_of,
)
from pycoll.triton_kernels.group import TritonGroup
from pycoll.triton_kernels.reduction import reduce_run
from pycoll.triton_kernels.segments import (
    UNIT_BYTES,
    copy_segment,
    largest_numel,
    num_iterations,
    part_in_table,
    slot_of,
)
from pycoll.triton_kernels.signals import (
    PHASE_DIRECT_IN,
    begin_epoch,
    end_epoch,
    post_all,
    rank_of,
    wait_all,
    world_size_of,
)
from pycoll.triton_kernels.storage import storage_of


@triton.jit(do_not_specialize=["fingerprint", "factor_bits", "divisor", "slot_units"])
def reduce_scatter_kernel(
    group,
    input,
    output,
    chunks,
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
    slot_units = tl.cast(slot_units, tl.int64)
    rank = rank_of(group)
    world_size = world_size_of(group)
    epoch, goes_on = begin_epoch(group, fingerprint, factor_bits)
    largest = tl.cdiv(largest_numel(chunks, world_size), UNIT)
    for iteration in range(num_iterations(largest, slot_units)):
        area = iteration % 2
        if goes_on:
            for distance in range(1, world_size):
                dst = (rank + distance) % world_size
                first, begin, part = part_in_table(
                    chunks, dst, world_size, slot_units, iteration, ALIGNED, UNIT
                )
                slot = slot_of(group, area, dst, rank, slot_units, dtype)
                copy_segment(slot, input + first + begin, part, BLOCK, UNIT)
        post_all(group, area, epoch, iteration + 1, goes_on)
        goes_on = wait_all(group, area, epoch, iteration + 1, PHASE_DIRECT_IN, goes_on)
        if goes_on:
            first, begin, part = part_in_table(
                chunks, rank, world_size, slot_units, iteration, ALIGNED, UNIT
            )
            slots = slot_of(group, area, rank, 0, slot_units, dtype).to(tl.int64)
            own = input + first + begin
            reduce_run(group, output + begin, own, slots, slot_units * UNIT_BYTES, part, 0, BLOCK // UNIT,
                       epoch, factor_bits, divisor, slot_units, KIND, OP, ALIGNED, False, UNIT, BLOCK)  # fmt: skip
    end_epoch(group, epoch, goes_on)


def reduce_scatter(
    group: TritonGroup,
    input: Tensor,
    output: Tensor,
    op: str = "sum",
    *,
    numels: Sequence[int] | None = None,
    factor: float = 1.0,
) -> Tensor:
    """``output =`` this rank's chunk of the reduction of all inputs, in rank order.

    Args:
        input: all chunks, one after another.
        output: this rank's chunk; it may lie where the chunk lies in the input.
        op, factor: as of :func:`all_reduce`.
        numels: elements of each rank's chunk; None: equal ones.

    Raises:
        ValueError: a tensor, the op or numels does not fit.
    """
    check(group, {"input": input, "output": output}, op)
    chunks = numels_of(group, numels, ("input", input), ("output", output))
    call = Reduction(group, storage_of(input, op), storage_of(output, op), op, factor)
    launch_by_slots(
        reduce_scatter_kernel,
        group.layout,
        -(-max(chunks) // call.source.unit_numel),
        **call.arguments("reduce_scatter", tuple(chunks)),
        chunks=group.chunk_table(chunks),
        ALIGNED=chunks_are_aligned(call.source, chunks),
    )
    return output
