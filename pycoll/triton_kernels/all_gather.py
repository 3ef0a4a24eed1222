"""all_gather in one step: every rank sends its chunk to every rank. `chunks` and slots as of reduce_scatter."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from pycoll.triton_kernels.arguments import (
    check,
    chunks_are_aligned,
    num_blocks_for,
    numels_of,
    shape_of,
)
from pycoll.triton_kernels.group import TritonGroup, fingerprint
from pycoll.triton_kernels.launching import launch
from pycoll.triton_kernels.segments import (
    copy,
    first_element,
    largest_numel,
    num_iterations,
    numel_of,
    segment_of,
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
    own_numel = tl.load(chunks + world_size + rank)
    for iteration in range(num_iterations(largest, slot_units)):
        area = iteration % 2
        own_begin, units = segment_of(tl.cdiv(own_numel, UNIT), slot_units, iteration)
        own_part = numel_of(own_begin, units, own_numel, UNIT)
        source = input + own_begin * UNIT
        if goes_on:
            for distance in range(1, world_size):
                dst = (rank + distance) % world_size
                slot = slot_of(group, area, dst, rank, slot_units, dtype)
                copy(slot, source, own_part, 0, BLOCK // UNIT, BLOCK, UNIT)
            if COPIES_OWN:
                target = output + first_element(chunks, rank, ALIGNED, UNIT)
                copy(target + own_begin * UNIT, source, own_part, 0, BLOCK // UNIT, BLOCK, UNIT)
        post_all(group, area, epoch, iteration + 1, goes_on)
        goes_on = wait_all(group, area, epoch, iteration + 1, PHASE_DIRECT_IN, goes_on)
        if goes_on:
            for distance in range(1, world_size):
                src = (rank + distance) % world_size
                numel = tl.load(chunks + world_size + src)
                begin, units = segment_of(tl.cdiv(numel, UNIT), slot_units, iteration)
                slot = slot_of(group, area, rank, src, slot_units, dtype)
                target = output + first_element(chunks, src, ALIGNED, UNIT)
                part = numel_of(begin, units, numel, UNIT)
                copy(target + begin * UNIT, slot, part, 0, BLOCK // UNIT, BLOCK, UNIT)
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
    chunks = numels_of(group, numels, ("output", output.numel()), ("input", input.numel()))
    source, target = bytes_of(input), bytes_of(output)
    per_element = 2 if input.is_complex() else 1
    chunks = [numel * per_element for numel in chunks]
    begin = sum(chunks[: group.rank]) * source.tensor.element_size()
    arguments = {
        "group": group.table,
        "input": source.tensor,
        "output": target.tensor,
        "chunks": group.chunk_table(chunks),
        "fingerprint": fingerprint("all_gather", tuple(chunks), str(input.dtype)),
        "slot_units": group.layout.slot_units,
        "COPIES_OWN": source.tensor.data_ptr() != target.tensor.data_ptr() + begin,
        "ALIGNED": chunks_are_aligned(target, chunks, source),
        **shape_of(group, source),
    }
    units = -(-max(chunks) // source.unit_numel)
    num_blocks = num_blocks_for(group, units, group.layout.slot_units)
    launch(all_gather_kernel, num_blocks, group.layout.config.num_warps, **arguments)
    return output
