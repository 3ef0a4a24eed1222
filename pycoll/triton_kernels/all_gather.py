"""all_gather in one step: every rank sends its chunk to every rank. `chunks` and slots as of reduce_scatter."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from pycoll.triton_kernels.arguments import (
    check,
    chunks_are_aligned,
    launch_by_slots,
    numels_of,
    shape_of,
)
from pycoll.triton_kernels.group import TritonGroup, fingerprint
from pycoll.triton_kernels.segments import (
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
from pycoll.triton_kernels.storage import bytes_of


@triton.jit(do_not_specialize=["fingerprint", "slot_units"])
def all_gather_kernel(
    group,
    input,
    output,
    chunks,
    fingerprint,
    slot_units,
    COPIES_OWN: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """COPIES_OWN: the input is not yet where it belongs in the output."""
    dtype: tl.constexpr = input.dtype.element_ty
    slot_units = tl.cast(slot_units, tl.int64)
    rank = rank_of(group)
    world_size = world_size_of(group)
    epoch, goes_on = begin_epoch(group, fingerprint, 0)
    largest = tl.cdiv(largest_numel(chunks, world_size), UNIT)
    for iteration in range(num_iterations(largest, slot_units)):
        area = iteration % 2
        first, begin, part = part_in_table(
            chunks, rank, world_size, slot_units, iteration, ALIGNED, UNIT
        )
        source = input + begin
        if goes_on:
            for distance in range(1, world_size):
                dst = (rank + distance) % world_size
                slot = slot_of(group, area, dst, rank, slot_units, dtype)
                copy_segment(slot, source, part, BLOCK, UNIT)
            if COPIES_OWN:
                copy_segment(output + first + begin, source, part, BLOCK, UNIT)
        post_all(group, area, epoch, iteration + 1, goes_on)
        goes_on = wait_all(group, area, epoch, iteration + 1, PHASE_DIRECT_IN, goes_on)
        if goes_on:
            for distance in range(1, world_size):
                src = (rank + distance) % world_size
                first, begin, part = part_in_table(
                    chunks, src, world_size, slot_units, iteration, ALIGNED, UNIT
                )
                slot = slot_of(group, area, rank, src, slot_units, dtype)
                copy_segment(output + first + begin, slot, part, BLOCK, UNIT)
    end_epoch(group, epoch, goes_on)


def all_gather(
    group: TritonGroup, input: Tensor, output: Tensor, *, numels: Sequence[int] | None = None
) -> Tensor:
    """``output =`` the inputs of all ranks, one after another.

    Args:
        input: this rank's chunk; it may lie where it belongs in the output.
        output: room for all chunks.
        numels: elements of each rank's chunk; None: equal ones.

    Raises:
        ValueError: a tensor or numels does not fit.
    """
    check(group, {"input": input, "output": output}, None)
    chunks = numels_of(group, numels, ("output", output), ("input", input))
    source, target = bytes_of(input), bytes_of(output)
    begin = sum(chunks[: group.rank]) * source.tensor.element_size()
    launch_by_slots(
        all_gather_kernel,
        group.layout,
        -(-max(chunks) // source.unit_numel),
        group=group.table,
        input=source.tensor,
        output=target.tensor,
        chunks=group.chunk_table(chunks),
        fingerprint=fingerprint("all_gather", tuple(chunks), str(input.dtype)),
        COPIES_OWN=source.tensor.data_ptr() != target.tensor.data_ptr() + begin,
        ALIGNED=chunks_are_aligned(target, chunks, source),
        **shape_of(group, source),
    )
    return output
