"""Times many small all_reduces: one by one, and as one coalesced operation, over each backend, in turns.

    python benchmarks/coalescing.py -n 2 --tensors 1000 --nbytes 4K --json benchmarks/results/coalescing.json

Exit code: 0; 1 if ranks failed or a sum was wrong; 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from pycoll.bench.engine import TorchPeers
from pycoll.bench.results import machine_facts
from pycoll.bench.units import format_seconds, parse_nbytes
from pycoll.testing import RankError, RankPool

BACKENDS = ("gloo", "pycoll")
WARMUP_CALLS, TIMED_CALLS = 3, 5


def measure_on_rank(tensors: int, nbytes: int, coalesced: bool) -> float:
    """Median seconds for all of them, of the slowest rank, after a warm-up on the same tensors. Sums are checked."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    listed = [torch.empty(nbytes // 4) for _ in range(tensors)]
    peers = TorchPeers()
    times = []
    for _ in range(WARMUP_CALLS + TIMED_CALLS):
        for i, tensor in enumerate(listed):
            tensor.fill_(rank + i)
        peers.barrier()
        start = time.perf_counter()
        if coalesced:
            dist.all_reduce_coalesced(listed)
        else:
            for tensor in listed:
                dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    first = world_size * (world_size - 1) / 2
    for i, tensor in enumerate(listed):
        if not tensor.eq(first + world_size * i).all():
            raise RuntimeError(f"the sum of tensor {i} is wrong: {tensor[0].item()}")
    return statistics.median(peers.maxima(times[WARMUP_CALLS:]))


def measure(world_size: int, tensors: int, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by "backend, one by one" and "backend, coalesced"."""
    times: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        pools = {b: stack.enter_context(RankPool(world_size, b, timeout=120)) for b in BACKENDS}
        for number in range(rounds + 1):
            for backend, pool in pools.items():
                for how, coalesced in (("one by one", False), ("coalesced", True)):
                    seconds = pool.run(measure_on_rank, tensors, nbytes, coalesced)[0]
                    if number > 0:  # the first round warms up
                        times.setdefault(f"{backend}, {how}", []).append(seconds)
    return times


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-n", "--world-size", type=int, default=2, metavar="RANKS")
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--nbytes", type=parse_nbytes, default=4096, help="of a tensor")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    for name in ("world_size", "tensors", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"{name} is {getattr(arguments, name)}, but must be at least 1")
    try:
        times = measure(arguments.world_size, arguments.tensors, arguments.nbytes, arguments.rounds)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    for name, rounds in times.items():
        print(f"{name}: {format_seconds(statistics.median(rounds))}")
    for backend in BACKENDS:
        pairs = zip(times[f"{backend}, one by one"], times[f"{backend}, coalesced"], strict=True)
        print(f"{backend}: coalesced {statistics.median(a / b for a, b in pairs):.1f} x as fast")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        whole = {
            "facts": machine_facts(),
            "arguments": vars(arguments) | {"json": None},
            "seconds": times,
        }
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
