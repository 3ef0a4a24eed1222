"""Algorithm and bus bandwidth, as nccl-tests defines them (its doc/PERFORMANCE.md).

S is the *total* size of a collective in bytes, see `SIZE_MEANING`. Algorithm bandwidth is S / time.
Bus bandwidth multiplies it by what each rank has to move at least per byte of S, so that a figure
can be held against the speed of the hardware whatever the number of ranks. Both are in GB/s with GB
= 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

SIZE_MEANING = {
    "all_reduce": "the tensor on each rank",
    "all_gather": "the gathered output (n × the input of a rank)",
    "reduce_scatter": "the input of a rank (n × its output)",
    "all_to_all": "all that a rank sends, its own part included",
    "broadcast": "the tensor",
    "reduce": "the tensor on each rank",
    "gather": "the gathered output (n × the input of a rank)",
    "scatter": "the input of the root (n × the output of a rank)",
    "send_recv": "what a rank sends to the next one, and receives from the one before",
    "barrier": "nothing: only the time counts",
}
# Collectives whose S is made of one part a rank.
CUT_INTO_PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
GIGABYTE = 1e9


def algorithm_bandwidth(total_bytes: int, seconds: float) -> float:
    """S / time in GB/s. Raises ValueError unless seconds > 0."""
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    return total_bytes / seconds / GIGABYTE


def bus_factor(op: str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth for n ranks; 0 for n = 1, where no byte crosses a bus.

    all_reduce: 2 (n − 1) / n, as each rank has to send and receive that many bytes per byte of S
    (reduce-scatter, then all-gather). all_gather, reduce_scatter, all_to_all, gather, scatter:
    (n − 1) / n, the rank's own part stays. broadcast, reduce, send_recv: 1. barrier: 0.

    Raises:
        ValueError: for an op without a formula or a world size below 1.
    """
    if op not in SIZE_MEANING:
        raise ValueError(f"no bus bandwidth formula for {op!r}; known: {', '.join(SIZE_MEANING)}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if world_size == 1 or op == "barrier":
        return 0.0
    share_of_others = (world_size - 1) / world_size
    if op in CUT_INTO_PARTS:
        return share_of_others
    return 2 * share_of_others if op == "all_reduce" else 1.0


def bus_bandwidth(op: str, total_bytes: int, world_size: int, seconds: float) -> float:
    """Bus bandwidth in GB/s of one collective of S = total_bytes that took `seconds`."""
    return bus_factor(op, world_size) * algorithm_bandwidth(total_bytes, seconds)


def uneven_all_to_all_bus_bandwidth(sent_bytes: Sequence[Sequence[int]], seconds: float) -> float:
    """Bus bandwidth in GB/s of an all-to-all with uneven splits.

    The busiest rank decides: the most bytes that any one rank sends to, or receives from, the
    others. With even splits this is (n − 1) / n × S / time, the formula for all_to_all.

    Args:
        sent_bytes: n × n; sent_bytes[i][j] is what rank i sends to rank j.
        seconds: duration of the call.

    Raises:
        ValueError: if the table is not square or seconds is not positive.
    """
    ranks = range(len(sent_bytes))
    if any(len(row) != len(sent_bytes) for row in sent_bytes):
        lengths = [len(row) for row in sent_bytes]
        raise ValueError(f"sent_bytes must be n × n, got {len(ranks)} rows of {lengths}")
    sent = [sum(sent_bytes[rank][peer] for peer in ranks if peer != rank) for rank in ranks]
    received = [sum(sent_bytes[peer][rank] for peer in ranks if peer != rank) for rank in ranks]
    return algorithm_bandwidth(max(sent + received, default=0), seconds)
