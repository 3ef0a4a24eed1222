"""One job of a long random test: what each of its ranks runs.

All ranks draw the same actions from one seed: collectives of any kind, size, dtype and group, messages,
bursts of asynchronous operations, groups that come and go; and each draws delays of its own. Every result
is checked. A rank may be told to kill itself at some moment; the others then name it, shrink and go on.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pycoll

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
SIZES = (1, 7, 1009, 4099, 30_011, 150_001)
ALGORITHMS = ("auto", "ring", "two_shot", "one_shot", "direct")
ROUND = 100  # actions between two looks at what the process holds
SETTLED = 3  # rounds after which it holds no more


class Job:
    def __init__(self, seed: int, victim: int | None) -> None:
        self.seed, self.victim = seed, victim
        self.own = random.Random(seed * 1000 + dist.get_rank())  # for delays
        self.groups: list[tuple[Any, list[int]]] = []  # a group, maybe without this rank; its ranks
        self.actions = self.rounds = self.deaths = 0
        self.baseline: dict[str, int] | None = None

    # --- actions: the same on all ranks, drawn from `rng` --------------------------------------------

    def contribution(self, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Small whole numbers, so that sums are exact, that depend on the rank, the place and the action."""
        ramp = torch.arange(numel) % 7
        return (ramp + rank % 3 + self.actions % 4).to(dtype)

    def group_of(self, rng: random.Random) -> tuple[Any, list[int]]:
        return rng.choice([(None, list(range(dist.get_world_size()))), *self.groups])

    def all_reduce(self, rng: random.Random, async_op: bool = False) -> Callable[[], None]:
        group, ranks = self.group_of(rng)
        numel, dtype = rng.choice(SIZES), rng.choice(DTYPES)
        op = rng.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN])
        all_of_them = torch.stack([self.contribution(r, numel, dtype).double() for r in ranks])
        reduced = {
            dist.ReduceOp.SUM: all_of_them.sum(0),
            dist.ReduceOp.MAX: all_of_them.amax(0),
            dist.ReduceOp.MIN: all_of_them.amin(0),
        }[op].to(dtype)
        if dist.get_rank() not in ranks:
            return lambda: None
        x = self.contribution(dist.get_rank(), numel, dtype)
        work = dist.all_reduce(x, op, group=group, async_op=async_op)

        def check() -> None:
            if work is not None:
                work.wait()
            assert torch.equal(x, reduced), ("all_reduce", self.actions)

        return check

    def moves(self, rng: random.Random) -> Callable[[], None]:
        """all_gather, reduce_scatter, broadcast, all_to_all."""
        group, ranks = self.group_of(rng)
        numel, dtype, kind = rng.choice(SIZES[:5]), rng.choice(DTYPES), rng.randrange(4)
        root = rng.choice(ranks)
        me, n = dist.get_rank(), len(ranks)
        if me not in ranks:
            return lambda: None
        mine = self.contribution(me, numel, dtype)
        rows = [self.contribution(r, numel, dtype) for r in ranks]
        if kind == 0:
            actual, expected = torch.empty(n * numel, dtype=dtype), torch.cat(rows)
            dist.all_gather_into_tensor(actual, mine, group=group)
        elif kind == 1:
            actual = torch.empty(numel, dtype=dtype)
            expected = torch.stack([row.double() for row in rows]).sum(0).to(dtype)
            dist.reduce_scatter_tensor(actual, mine.repeat(n), group=group)
        elif kind == 2:
            actual, expected = mine, rows[ranks.index(root)]
            dist.broadcast(actual, root, group=group)
        else:
            actual = torch.empty(n * numel, dtype=dtype)
            expected = torch.cat(rows)
            dist.all_to_all_single(actual, mine.repeat(n), group=group)
        assert torch.equal(actual, expected), (kind, self.actions)
        return lambda: None

    def burst(self, rng: random.Random) -> Callable[[], None]:
        checks = [self.all_reduce(rng, async_op=True) for _ in range(rng.randrange(2, 30))]
        rng.shuffle(checks)

        def check() -> None:
            for one in checks:
                one()

        return check

    def ring_of_messages(self, rng: random.Random) -> Callable[[], None]:
        me, n, numel = dist.get_rank(), dist.get_world_size(), rng.choice(SIZES)
        left, right = (me - 1) % n, (me + 1) % n
        if n == 1:
            return lambda: None
        got = torch.empty(numel)
        sent = dist.isend(self.contribution(me, numel, torch.float32), right, tag=self.actions)
        dist.recv(got, left, tag=self.actions)
        sent.wait()
        assert torch.equal(got, self.contribution(left, numel, torch.float32)), self.actions
        return lambda: None

    # --- rounds --------------------------------------------------------------------------------------

    def one_action(self) -> None:
        rng = random.Random(self.seed * 1_000_003 + self.actions)
        kind = rng.choices(
            [
                self.all_reduce,
                self.moves,
                self.burst,
                self.ring_of_messages,
                lambda _: dist.barrier() or (lambda: None),
            ],
            [40, 30, 10, 12, 8],
        )[0]
        if self.own.random() < 0.02:
            time.sleep(self.own.random() * 0.01)
        check = kind(rng)
        if self.own.random() < 0.02:
            time.sleep(self.own.random() * 0.01)
        check()
        self.actions += 1

    def one_round(self) -> bool:
        """Whether there is time for another one, as rank 0 says; until the victim has died there is."""
        rng = random.Random(self.seed + self.rounds)
        self.groups = []
        for _ in range(rng.randrange(4)):
            n = dist.get_world_size()
            ranks = sorted(rng.sample(range(n), rng.randrange(1, n + 1)))
            options = pycoll.Options(algorithm=rng.choice(ALGORITHMS))
            group = dist.new_group(ranks, timeout=timedelta(seconds=240), pg_options=options)
            self.groups.append((group, ranks))
        for _ in range(ROUND):
            self.one_action()
        while self.groups:
            group, ranks = self.groups.pop()
            if dist.get_rank() in ranks:
                dist.destroy_process_group(group)
            del group
        self.rounds += 1
        self.look()
        is_early = time.monotonic() < float(os.environ["UNTIL"])
        more = torch.tensor([float(is_early or self.victim is not None)])
        dist.broadcast(more, 0)
        return bool(more.item())

    def look(self) -> None:
        """Nothing that a process holds may grow."""
        gc.collect()
        status = Path("/proc/self/status").read_text().splitlines()
        fields = {line.split(":")[0]: line.split()[1] for line in status if len(line.split()) > 1}
        held = {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": int(fields["Threads"]),
            "MiB": int(fields["VmRSS"]) // 1024,
        }
        if self.rounds == SETTLED:
            self.baseline = held
        elif self.baseline is not None:
            assert held["descriptors"] <= self.baseline["descriptors"], (held, self.baseline)
            assert held["threads"] <= self.baseline["threads"] + 2, (held, self.baseline)
            assert held["MiB"] < self.baseline["MiB"] + 150, (held, self.baseline)
        self.held = held

    def run(self) -> None:
        while True:
            try:
                while self.one_round():
                    pass
                return
            except RuntimeError:
                # Who waits for a rank that has gone on already hears of that one instead.
                # A process whose memory is gone is known to be dead a moment later.
                patience = time.monotonic() + 5
                while self.victim is not None and self.victim not in pycoll.dead_ranks():
                    if time.monotonic() > patience:
                        raise
                    time.sleep(0.01)
                if self.victim is None:
                    raise
                self.go_on()

    def go_on(self) -> None:
        self.victim = None
        self.groups = []
        self.deaths += 1
        pycoll.shrink()
        # The ranks that are left may have stopped at different actions.
        at = torch.tensor([self.rounds + 1])
        dist.all_reduce(at, dist.ReduceOp.MAX)
        self.rounds = int(at.item())
        self.actions = self.rounds * 1000
        self.baseline = None


def main() -> None:
    torch.set_num_threads(1)
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seed = int(os.environ["SEED"])
    victim = int(os.environ["VICTIM"]) if "VICTIM" in os.environ else None
    store = dist.FileStore(os.environ["STORE"], n)
    dist.init_process_group(
        "pycoll", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=240)
    )
    if rank == victim:
        delay = float(os.environ["VICTIM_AFTER"])
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    job = Job(seed, victim)
    job.run()
    done = {"actions": job.actions, "rounds": job.rounds, "deaths": job.deaths, **job.held}
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
