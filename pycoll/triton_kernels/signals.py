"""Signals between ranks inside Triton kernels: the meeting, posts, waits that end.

The protocol and the layout of control memory, signals and epochs are those of the CUDA kernels (docs/kernels.md): an
epoch counts a group's operations; block b of a rank talks to the blocks b of the others; block 0 sends the entries of
the meeting.

Triton has no threads, which makes three rules (docs/triton.md, "What Triton does to a signal"):

- A release signals for the whole block only if a block barrier stands before it. Triton 3.6 puts none there, so that
every
  release here follows a ``tl.debug_barrier()``.
- What another rank or the clock may change between two threads' loads must not decide a branch. Every value that a
loop here
  looks at comes from a scalar atomic, which one thread executes and hands to all.
- A scalar store or atomic is executed by one thread, under that thread's mask.

A kernel gets all that concerns its group by one pointer, `group`, to int64: rank, world size, deadline in nanoseconds,
addresses of the rank's own epochs, abort word and failure record, then for each kind of memory the addresses of all
ranks'.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import globaltimer

MAX_BLOCKS = tl.constexpr(128)
MEETING_BYTES = tl.constexpr(32)
RANK = tl.constexpr(0)
WORLD_SIZE = tl.constexpr(1)
TIMEOUT = tl.constexpr(2)
EPOCHS = tl.constexpr(3)
ABORT = tl.constexpr(4)
RECORD = tl.constexpr(5)
HEADER = tl.constexpr(8)
# Kinds of memory, in the order of the table.
CONTROL = tl.constexpr(0)
SIGNALS = tl.constexpr(1)
RING_SIGNALS = tl.constexpr(2)
SLOTS = tl.constexpr(3)
MAILBOXES = tl.constexpr(4)
NUM_KINDS = 5

# As in csrc/kernels/cuda/failure.h.
DEADLINE = tl.constexpr(1)
MISMATCH = tl.constexpr(2)
PHASE_MEETING = tl.constexpr(1)
PHASE_ONE_SHOT = tl.constexpr(3)
PHASE_DIRECT_IN = tl.constexpr(4)
PHASE_DIRECT_OUT = tl.constexpr(5)
PHASE_RING_RECEIVE = tl.constexpr(6)
PHASE_RING_SEND = tl.constexpr(7)
PHASES = {1: "meeting", 3: "one-shot data", 4: "direct, in", 5: "direct, out"}
PHASES |= {6: "ring, receive", 7: "ring, send"}

# The interpreter has no clock: there a poll counts as so long.
HAS_CLOCK = tl.constexpr(not knobs.runtime.interpret)
POLL_NS = tl.constexpr(200_000)
# Clock and abort word cost more than a poll.
POLLS_PER_LOOK = tl.constexpr(32)


# ---- the group


@triton.jit
def rank_of(group):
    return tl.load(group + RANK).to(tl.int32)


@triton.jit
def world_size_of(group):
    return tl.load(group + WORLD_SIZE).to(tl.int32)


@triton.jit
def memory_of(group, KIND: tl.constexpr, rank):
    """Where this rank sees the memory of another one; an int64."""
    return tl.load(group + HEADER + world_size_of(group) * KIND + rank)


@triton.jit
def pointer_to(address, dtype: tl.constexpr):
    return address.to(tl.pointer_type(dtype))


@triton.jit
def aligned_pointer_to(address, dtype: tl.constexpr):
    """To a multiple of 16 bytes, which the compiler is told."""
    return tl.multiple_of(pointer_to(address, dtype), 16)


# ---- failures


@triton.jit
def abort_word(group):
    return pointer_to(tl.load(group + ABORT), tl.int32)


@triton.jit
def is_going_on(group):
    return tl.atomic_add(abort_word(group), 0, sem="relaxed", scope="sys") == 0


@triton.jit
def write_record(group, kind, phase, peer, expected, seen, wanted):
    """Where `wanted` holds for the thread that stores. The kind comes last, so that a host that sees it finds the
    rest."""
    record = tl.load(group + RECORD)
    words = pointer_to(record, tl.int32)
    values = pointer_to(record, tl.int64)
    tl.store(words + 1, phase, mask=wanted)
    tl.store(words + 2, rank_of(group), mask=wanted)
    tl.store(words + 3, peer, mask=wanted)
    tl.store(values + 2, expected.to(tl.int64), mask=wanted)
    tl.store(values + 3, seen.to(tl.int64), mask=wanted)
    tl.atomic_xchg(words, kind, mask=wanted, sem="release", scope="sys")


@triton.jit
def report_mismatch(group, phase, peer, expected, seen):
    """By one block; nothing if somebody has reported before."""
    before = tl.atomic_add(abort_word(group), 1, sem="relaxed", scope="sys")
    write_record(group, MISMATCH, phase, peer, expected, seen, before == 0)


# ---- waiting


@triton.jit
def now_ns(polls):
    if HAS_CLOCK:
        return globaltimer()
    else:
        return polls.to(tl.int64) * POLL_NS


@triton.jit
def wait_reached(group, signal, expected, phase, peer, goes_on):
    """Until the counter, which `peer` raises, has come to `expected` (acquire); false if it does not come in time, if
    the group was aborted, or at once if not `goes_on`.

    The clock differs from thread to thread. It decides nothing but what the one thread that executes scalar atomics
    adds to the abort word; what it finds there decides for all.
    """
    timeout_ns = tl.load(group + TIMEOUT)
    polls = tl.full((), 0, tl.int32)
    begin_ns = now_ns(polls)
    stops = tl.where(goes_on, 0, 1)
    seen = expected
    if goes_on:
        seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    while (seen - expected < 0) & (stops == 0):
        polls += 1
        if polls % POLLS_PER_LOOK == 0:
            is_late = (now_ns(polls) - begin_ns) >= timeout_ns
            stops = tl.atomic_add(
                abort_word(group), is_late.to(tl.int32), sem="relaxed", scope="sys"
            )
            write_record(group, DEADLINE, phase, peer, expected, seen, is_late & (stops == 0))
        seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    return goes_on & (seen - expected >= 0)


# ---- epochs and the meeting


@triton.jit
def next_epoch(group):
    epochs = pointer_to(tl.load(group + EPOCHS), tl.int32)
    return tl.load(epochs + tl.program_id(0)) + 1


@triton.jit
def end_epoch(group, epoch, goes_on):
    """When every thread has read the epoch. Each block writes words that no other block of its grid reads."""
    tl.debug_barrier()
    epochs = pointer_to(tl.load(group + EPOCHS), tl.int32)
    words = tl.program_id(0) + tl.arange(0, MAX_BLOCKS) * tl.num_programs(0)
    end = tl.where(goes_on, MAX_BLOCKS, 0)
    tl.store(epochs + words, epoch + tl.zeros_like(words), mask=words < end)


@triton.jit
def entry_of(group, owner, src, epoch):
    """Where `src` tells `owner` what it has come for: fingerprint, factor, (unused), epoch."""
    entry = (epoch & 1) * world_size_of(group) + src
    return memory_of(group, CONTROL, owner) + entry * MEETING_BYTES


@triton.jit
def send_entries(group, epoch, fingerprint, factor_bits):
    """Tells all ranks, by block 0: this rank has come, and what for."""
    rank = rank_of(group)
    world_size = world_size_of(group)
    if tl.program_id(0) == 0:
        for step in range(1, world_size):
            entry = entry_of(group, (rank + step) % world_size, rank, epoch)
            values = pointer_to(entry, tl.int64)
            tl.store(values, fingerprint)
            tl.store(values + 1, factor_bits)
        tl.debug_barrier()
        for step in range(1, world_size):
            entry = entry_of(group, (rank + step) % world_size, rank, epoch)
            tl.atomic_xchg(pointer_to(entry + 24, tl.int32), epoch, sem="release", scope="sys")


@triton.jit
def meet_all(group, epoch, fingerprint, goes_on):
    """Waits for the entries of all ranks and compares; false if one does not come, or has come for something else."""
    rank = rank_of(group)
    world_size = world_size_of(group)
    for step in range(1, world_size):
        src = (rank + step) % world_size
        entry = entry_of(group, rank, src, epoch)
        arrived = pointer_to(entry + 24, tl.int32)
        goes_on = wait_reached(group, arrived, epoch, PHASE_MEETING, src, goes_on)
        if goes_on:
            seen = tl.load(pointer_to(entry, tl.int64))
            goes_on = seen == fingerprint
            # The others must not: that would keep a block 0 which has not begun from sending.
            if (seen != fingerprint) & (tl.program_id(0) == 0):
                report_mismatch(group, PHASE_MEETING, src, fingerprint, seen)
    return goes_on


@triton.jit
def begin_epoch(group, fingerprint, factor_bits):
    """The number of this operation, and whether all ranks have come to it."""
    epoch = next_epoch(group)
    goes_on = is_going_on(group)
    if goes_on:
        send_entries(group, epoch, fingerprint, factor_bits)
    return epoch, meet_all(group, epoch, fingerprint, goes_on)


@triton.jit
def factor_of(group, src, epoch, own_factor_bits):
    """The factor of PREMUL_SUM of a rank that has been met; float64."""
    rank = rank_of(group)
    entry = pointer_to(entry_of(group, rank, src, epoch), tl.int64)
    theirs = tl.load(entry + 1, mask=src != rank, other=0)
    return tl.where(src == rank, own_factor_bits.to(tl.int64), theirs).to(tl.float64, bitcast=True)


# ---- signals of the direct kernels


@triton.jit
def signal_value(epoch, step):
    """Grows from step to step of an operation, and from operation to operation."""
    return (epoch.to(tl.int64) << 32) | step


@triton.jit
def direct_signal(group, area, owner, src):
    index = (tl.program_id(0) + area * MAX_BLOCKS) * world_size_of(group) + src
    return pointer_to(memory_of(group, SIGNALS, owner), tl.int64) + index


@triton.jit
def post_all(group, area, epoch, step, goes_on):
    """This block's stores to slots, and its loads from its own, are over for the blocks of the same number that see
    it."""
    rank = rank_of(group)
    world_size = world_size_of(group)
    tl.debug_barrier()
    if goes_on:
        for distance in range(1, world_size):
            dst = (rank + distance) % world_size
            signal = direct_signal(group, area, dst, rank)
            tl.atomic_xchg(signal, signal_value(epoch, step), sem="release", scope="sys")


@triton.jit
def wait_all(group, area, epoch, step, phase, goes_on):
    """Until all ranks have posted as much."""
    rank = rank_of(group)
    world_size = world_size_of(group)
    for distance in range(1, world_size):
        src = (rank + distance) % world_size
        signal = direct_signal(group, area, rank, src)
        goes_on = wait_reached(group, signal, signal_value(epoch, step), phase, src, goes_on)
    return goes_on
