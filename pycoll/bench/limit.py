"""The roofline: what the least work for a collective takes, over buffers that all ranks map.

Each rank is a pinned thread. It reads and writes its share of the collective's bytes with the widest vectors of
the CPU, the better of ordinary stores and stores past the caches, and then meets the others at one barrier.
Before each sweep every rank writes to its own buffers, untimed, as a program does that makes a collective's
input: half of what two ranks read then comes from the other core. There is no copy into staging, no selection
and no call. `transfers` is the table of what each collective has to read and write (docs/performance.md words
it); sums are of float32 whatever the dtype, since bytes decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from pycoll.backend import extension
from pycoll.bench.cases import Case, total_nbytes

ALIGNMENT = 64


@dataclass(frozen=True)
class Transfer:
    """Bytes [begin, end) of every destination become the sum of those of the sources.

    Buffers are numbered: one input a rank (0 to n − 1), then one output a rank (n to 2 n − 1). ``at`` and
    ``to`` say where in a source, and in a destination, byte 0 lies.
    """

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    begin: int
    end: int
    at: int = 0
    to: int = 0


def share(nbytes: int, world_size: int, rank: int) -> tuple[int, int]:
    """Rank's part of a buffer: as even as lines of the cache allow; a part may be empty."""
    lines = -(-nbytes // ALIGNMENT)
    edges = (rank * lines // world_size, (rank + 1) * lines // world_size)
    begin, end = (min(nbytes, edge * ALIGNMENT) for edge in edges)
    return begin, end


def transfers(op: str, nbytes: int, world_size: int) -> list[list[Transfer]] | None:
    """What each rank reads and writes, for S = nbytes; None for an op without a limit.

    Collectives that reduce or copy in place use the inputs as outputs. Root is rank 0; all ranks help it.
    """
    ranks = range(world_size)
    inputs, outputs = tuple(ranks), tuple(world_size + rank for rank in ranks)
    part = nbytes // world_size
    padded = padded_part(part)

    def shared(sources: tuple[int, ...], destinations: tuple[int, ...]) -> list[list[Transfer]]:
        edges = [share(nbytes, world_size, rank) for rank in ranks]
        return [[Transfer(sources, destinations, *edge)] for edge in edges]

    match op:
        case "all_reduce":
            return shared(inputs, inputs)
        case "reduce":
            return shared(inputs, inputs[:1])
        case "broadcast":
            return shared(inputs[:1], inputs[1:]) if world_size > 1 else [[]]
        case "send_recv":
            before = [(rank - 1) % world_size for rank in ranks]
            return [[Transfer((before[rank],), (outputs[rank],), 0, nbytes)] for rank in ranks]
        case "reduce_scatter":
            return [[Transfer(inputs, (outputs[r],), 0, part, at=r * padded, to=0)] for r in ranks]
        case "all_gather":
            return [
                [Transfer((peer,), (outputs[r],), 0, part, to=peer * padded) for peer in ranks]
                for r in ranks
            ]
        case "all_to_all":
            return [
                [
                    Transfer((peer,), (outputs[r],), 0, part, at=r * padded, to=peer * padded)
                    for peer in ranks
                ]
                for r in ranks
            ]
        case "gather":
            return [[Transfer((r,), outputs[:1], 0, part, to=r * padded)] for r in ranks]
        case "scatter":
            return [[Transfer(inputs[:1], (outputs[r],), 0, part, at=r * padded)] for r in ranks]
        case _:
            return None


def padded_part(part: int) -> int:
    """Parts begin at lines of the cache, as vectors want them."""
    return -(-part // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Limit:
    """Seconds, and what was quickest: "ordinary" or "non-temporal" stores, of an instruction set."""

    seconds: float
    store: str
    instruction_set: str


def measure_limit(
    case: Case, world_size: int, repetitions: int = 3, repetition_seconds: float = 0.02
) -> Limit | None:
    """The roofline of a case on this host's CPU, now; None where it has no meaning.

    Raises:
        ValueError: the buffers cannot be had; the message says how many bytes.
    """
    if case.device != "cpu":
        return None
    nbytes = total_nbytes(case, world_size)
    of_ranks = transfers(case.op, nbytes, world_size)
    if of_ranks is None:
        return None
    # Buffers end on different lines, lest all ranks' lines fall into the same set of the cache.
    stride = padded_part(nbytes) + world_size * ALIGNMENT + 17 * ALIGNMENT
    owned = [
        [(buffer * stride, nbytes) for buffer in (rank, world_size + rank)]
        for rank in range(world_size)
    ]
    plan = [
        [
            (
                [buffer * stride + t.at + t.begin for buffer in t.sources],
                [buffer * stride + t.to + t.begin for buffer in t.destinations],
                t.end - t.begin,
            )
            for t in mine
        ]
        for mine in of_ranks
    ]
    try:
        best = extension().roofline(
            2 * world_size * stride, owned, plan, repetitions, repetition_seconds
        )
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    return Limit(*best)
