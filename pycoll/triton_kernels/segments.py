"""How blocks share out data, and how they move it, inside Triton kernels.

Data is cut into units of 16 bytes, counted from its beginning; chunks and segments are whole units, but for the data's
end. A mask that is the same for all elements of a unit leaves accesses as wide as units, so a run of elements is moved
as its whole units first, by such a mask, and then its last, shorter unit by itself.
"""

import triton
import triton.language as tl

from pycoll.triton_kernels.signals import SLOTS, aligned_pointer_to, memory_of, world_size_of

UNIT_BYTES = tl.constexpr(16)


@triton.jit
def chunk_of(num_units, world_size, rank):
    """First unit and number of units of a rank's part, as csrc/topology/partition.h cuts."""
    base = num_units // world_size
    rest = num_units - base * world_size
    begin = rank * base + tl.minimum(tl.cast(rank, tl.int64), rest)
    return begin, base + tl.cast(rank < rest, tl.int64)


@triton.jit
def largest_numel(chunks, world_size):
    """The largest number of elements in a table of chunks: first elements, then numbers of elements."""
    largest = tl.load(chunks + world_size)
    for rank in range(1, world_size):
        largest = tl.maximum(largest, tl.load(chunks + world_size + rank))
    return largest


@triton.jit
def first_element(chunks, rank, ALIGNED: tl.constexpr, UNIT: tl.constexpr):
    """Of a rank's chunk. ALIGNED: it is the first one of a unit, which the compiler is told."""
    begin = tl.load(chunks + rank)
    if ALIGNED:
        begin = tl.multiple_of(begin, UNIT)
    return begin


@triton.jit
def segment_of(chunk_units, slot_units, iteration):
    """The segment of a chunk that this block works on: first unit, and how many; 0 beyond the end."""
    index = tl.cast(iteration, tl.int64) * tl.num_programs(0) + tl.program_id(0)
    begin = tl.minimum(index * slot_units, chunk_units)
    return begin, tl.minimum(chunk_units - begin, slot_units)


@triton.jit
def num_iterations(largest_chunk_units, slot_units):
    """How often this block finds a segment in the largest chunk: as often as every block of its number on other
    ranks."""
    segments = tl.cdiv(largest_chunk_units, slot_units)
    blocks = tl.num_programs(0)
    return tl.cdiv(tl.maximum(segments - tl.program_id(0), 0), blocks)


@triton.jit
def numel_of(begin_unit, num_units, total_numel, UNIT: tl.constexpr):
    """Elements in a run of units of data that may end within the last one."""
    rest = tl.maximum(total_numel - begin_unit * UNIT, 0)
    return tl.minimum(num_units * UNIT, rest)


@triton.jit
def part_of(num_units, numel, owner, world_size, slot_units, iteration, UNIT: tl.constexpr):
    """The elements of `owner`'s chunk in this block's iteration: where they begin, and how many."""
    chunk, chunk_units = chunk_of(num_units, world_size, owner)
    begin, units = segment_of(chunk_units, slot_units, iteration)
    return (chunk + begin) * UNIT, numel_of(chunk + begin, units, numel, UNIT)


@triton.jit
def part_in_table(
    chunks, owner, world_size, slot_units, iteration, ALIGNED: tl.constexpr, UNIT: tl.constexpr
):
    """As part_of, of a table of chunks: where `owner`'s chunk begins, where in it the elements begin, and how many."""
    numel = tl.load(chunks + world_size + owner)
    begin, units = segment_of(tl.cdiv(numel, UNIT), slot_units, iteration)
    first = first_element(chunks, owner, ALIGNED, UNIT)
    return first, begin * UNIT, numel_of(begin, units, numel, UNIT)


@triton.jit
def slot_of(group, area, owner, src, slot_units, dtype: tl.constexpr):
    """Where `src` leaves data for this block of `owner`."""
    place = tl.cast(tl.num_programs(0) * area + tl.program_id(0), tl.int64)
    index = place * world_size_of(group) + src
    address = memory_of(group, SLOTS, owner) + index * slot_units * UNIT_BYTES
    return aligned_pointer_to(address, dtype)


@triton.jit
def block_of(unit, num_units, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Elements of a block that begins with `unit`, and which of them are in units before `num_units`."""
    lanes = tl.arange(0, BLOCK)
    return unit * UNIT + lanes, unit + lanes // UNIT < num_units


@triton.jit
def edge_of(numel, first_unit, UNIT: tl.constexpr):
    """Elements of a run's last, shorter unit, and which of them are there, for who begins at unit 0."""
    offsets = numel // UNIT * UNIT + tl.arange(0, UNIT)
    return offsets, offsets < tl.where(first_unit == 0, numel, 0)


@triton.jit
def copy(dst, src, numel, first_unit, stride_units, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Elements [0, numel): in blocks of BLOCK from `first_unit` on, `stride_units` apart; the shorter last unit by who
    begins at 0. Other threads see it after the next barrier."""
    num_units = numel // UNIT
    for unit in range(first_unit, num_units, stride_units):
        offsets, mask = block_of(unit, num_units, BLOCK, UNIT)
        tl.store(dst + offsets, tl.load(src + offsets, mask=mask), mask=mask)
    offsets, mask = edge_of(numel, first_unit, UNIT)
    tl.store(dst + offsets, tl.load(src + offsets, mask=mask), mask=mask)


@triton.jit
def copy_segment(dst, src, numel, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """All of it by this block."""
    copy(dst, src, numel, 0, BLOCK // UNIT, BLOCK, UNIT)
