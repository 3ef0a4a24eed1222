"""Random jobs, with and without deaths: for seconds in the suite, for as long as one likes by `make soak`."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from scripts import Ranks, assert_codes

MINUTES = "PYCOLL_SOAK_MINUTES"
SCRIPT = """
import sys
sys.path.insert(0, TESTS)
import soak_job
soak_job.main()
""".replace("TESTS", repr(str(Path(__file__).parent)))


def run_job(
    seed: int, world_size: int, seconds: float, victim: int | None, directory: Path
) -> dict[str, int]:
    """What rank 0, or the first that lived, says of the job."""
    directory.mkdir()
    env = {"SEED": str(seed), "UNTIL": str(time.monotonic() + 5 + seconds)}
    if victim is not None:
        env |= {"VICTIM": str(victim), "VICTIM_AFTER": str(seconds * 0.4)}
    with Ranks(SCRIPT, world_size, directory, **env) as ranks:
        ended = ranks.end(timeout=seconds + 400)
    codes = [-signal.SIGKILL if rank == victim else 0 for rank in range(world_size)]
    assert_codes(ended, *codes)
    said = [json.loads(rank.out) for rank in ended if rank.out]
    assert len({(one["actions"], one["deaths"]) for one in said}) == 1, said
    assert said[0]["deaths"] == (victim is not None), said
    return said[0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [None, 2])
def test_a_random_job(victim: int | None, tmp_path: Path) -> None:
    done = run_job(seed=11, world_size=4, seconds=6, victim=victim, directory=tmp_path / "job")
    assert done["actions"] >= 100


@pytest.mark.soak
def test_random_jobs_for_a_long_time(tmp_path: Path) -> None:
    """Prints its figures: `make soak` shows them."""
    seconds = 60 * float(os.environ.get(MINUTES, "20"))
    rng = random.Random(int(os.environ.get("SEED", "1")))
    begin, before = time.monotonic(), set(os.listdir("/dev/shm"))
    jobs = actions = deaths = 0
    while time.monotonic() - begin < seconds:
        world_size = rng.randrange(2, 6)
        # Rank 0 too, but not in a world of two, whose survivor has nobody to go on with.
        dies = world_size > 2 and rng.random() < 0.5
        victim = rng.randrange(world_size) if dies else None
        done = run_job(rng.randrange(10**6), world_size, 20, victim, tmp_path / str(jobs))
        jobs, actions, deaths = jobs + 1, actions + done["actions"], deaths + done["deaths"]
        print(f"{time.monotonic() - begin:6.0f} s: {jobs} jobs, {deaths} deaths", done, flush=True)
    assert {name for name in set(os.listdir("/dev/shm")) - before if "pycoll" in name} == set()
    assert jobs > 0
