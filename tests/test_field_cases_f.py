"""Faults of processes: killed in any phase, raising, out of memory, stopped by a launcher. One test for each kind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from scripts import PRELUDE, Ranks, assert_codes, run_script, wait_until

pytestmark = pytest.mark.slow  # each test starts interpreters of its own

KILLED = -signal.SIGKILL


def mapped(segments: set[str]) -> list[str]:
    """Who still maps one of these: memory without a name goes with the last of them."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines = maps.read_text().splitlines()
            found += [
                line for line in lines if "memfd:pycoll" in line and line.split()[4] in segments
            ]
    return found


# --- a rank is killed ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_moment_of_any_collective(seed: int, tmp_path: Path) -> None:
    """Others spin for half an hour, or go on with sums that nobody has made."""
    script = f"""
        import random, threading
        init()
        n, x, y = world_size, torch.ones(30_011 * world_size), torch.ones(30_011)
        parts = [torch.ones(30_011) for _ in range(n)]
        calls = [lambda: dist.all_reduce(x), lambda: dist.broadcast(x, 0), lambda: dist.reduce(x, 2),
                 lambda: dist.all_gather_into_tensor(x, y), lambda: dist.reduce_scatter_tensor(y, x),
                 lambda: dist.all_to_all_single(x, x.clone()), dist.barrier,
                 lambda: dist.gather(y, parts if rank == 0 else None, dst=0),
                 lambda: dist.scatter(y, parts if rank == 0 else None, src=0)]
        names = ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier",
                 "gather", "scatter"]
        order = random.Random({seed})
        if rank == 1:  # a thread, so that it falls at any moment
            threading.Timer(0.5 + 0.2 * order.random(),
                            lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        order = random.Random({seed} + 7)
        def loop():
            while True:
                loop.name = names[(i := order.randrange(len(calls)))]
                loop.begin = time.monotonic()
                x.fill_(1), y.fill_(1)
                calls[i]()
        text, _ = raised(loop)
        took = time.monotonic() - loop.begin
        say(text)
        assert took < 3, took
        assert "rank 1" in text and loop.name in text, (loop.name, text)
    """
    assert_codes(run_script(script, 4, tmp_path), 0, KILLED, 0, 0)


def test_several_are_killed_in_a_subgroup(tmp_path: Path) -> None:
    script = """
        init()
        some, all_others = dist.new_group([0, 2, 3, 4]), dist.new_group([1, 4])
        x = torch.ones(500_009)
        if rank in (2, 3): dist.all_reduce(x, group=some); os.kill(os.getpid(), signal.SIGKILL)
        if rank in (0, 4):
            dist.all_reduce(x, group=some)
            text, took = raised(lambda: [dist.all_reduce(x, group=some) for _ in range(2)])
            say(text)
            assert took < 3 and "died" in text, (took, text)
            # A rank of the group is named by its number there.
            assert "rank 1 (pid" in text or "rank 2 (pid" in text, text
        if rank in (1, 4):
            x = torch.full((7,), rank + 1.0)
            dist.all_reduce(x, group=all_others)  # a group without the dead goes on
            assert x.tolist() == [7.0] * 7
    """
    assert_codes(run_script(script, 5, tmp_path), 0, 0, KILLED, KILLED, 0)


@pytest.mark.parametrize("moment", ["before it joins", "while it joins"])
def test_killed_while_a_group_is_made(moment: str, tmp_path: Path) -> None:
    """Who is missing is known at the deadline; who has been there is missed at once."""
    script = f"""
        import threading
        init()
        if rank == 1:
            if {moment!r} == "while it joins":
                threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
                dist.new_group(timeout=seconds(4))
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and {moment!r} == "while it joins": time.sleep(1)
        text, took = raised(lambda: dist.new_group(timeout=seconds(4)))
        say(text)
        assert took < 8, took
        assert "rank 1" in text, text
    """
    ended = run_script(script, 3, tmp_path)
    assert_codes(ended, 0, KILLED, 0)


def test_killed_in_the_backward_of_ddp(tmp_path: Path) -> None:
    script = """
        init()
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(torch.nn.Linear(50, 500), torch.nn.Linear(500, 7)), bucket_cap_mb=0.01)
        if rank == 1:
            model.module[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        def step(): model(torch.ones(3, 50)).sum().backward()
        text, took = raised(step)
        say(text)
        assert "rank 1" in text and "all_reduce" in text and took < 5, (took, text)
    """
    assert_codes(run_script(script, 3, tmp_path), 0, KILLED, 0)


def test_killed_where_its_pid_means_nothing_to_the_others(tmp_path: Path) -> None:
    """Containers have processes of their own; a death must show without the pid."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", "--pid", "--fork", "true"], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to make a PID namespace")
    script = """
        init()
        x = torch.ones(1009)
        dist.all_reduce(x)
        if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        text, took = raised(lambda: dist.all_reduce(x))
        say(text)
        assert "rank 1" in text and "died" in text and took < 3, (took, text)
    """
    source = PRELUDE + textwrap.dedent(script)
    base = {**os.environ, "WORLD_SIZE": "2", "STORE": str(tmp_path / "store")}
    # The first process of a namespace cannot kill itself: a shell is that one.
    apart = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", '"$@"; exit $?', "sh"]
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, "-c", source],
            env={**base, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, prefix in enumerate([apart, apart])
    ]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[0].returncode == 0, outputs
    assert processes[1].returncode != 0, outputs


# --- a rank raises, or is out of memory ------------------------------------------------------------


@pytest.mark.parametrize(
    "where",
    [
        "raise ValueError('on purpose')",
        "model(torch.ones(2, 4))",
        "out = torch.empty(2**58)",
    ],
    ids=["before a collective", "in a forward of DDP", "for lack of memory"],
)
def test_a_rank_raises_and_ends_alone(where: str, tmp_path: Path) -> None:
    """Others wait in its finalizer for ranks that wait for it."""
    script = f"""
        init()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        out = torch.empty(6)
        begin = time.monotonic()
        if rank == 1: {where}
        text, took = raised(lambda: dist.all_gather_into_tensor(torch.empty(18), out))
        say(text)
        assert "rank 1" in text and took < 5, (took, text)
    """
    ended = run_script(script, 3, tmp_path)
    assert_codes(ended, 0, 1, 0)
    assert "Error" in ended[1].err
    assert ended[1].seconds < min(ended[0].seconds, ended[2].seconds) + 2


def test_a_rank_that_skips_a_call_is_told(tmp_path: Path) -> None:
    """`except: continue` around a step: the next call of that rank meets another one of the others."""
    script = """
        init()
        x = torch.full((5,), rank + 1.0)
        def step():
            if rank == 1: raise ValueError("skipped")
            dist.all_reduce(x)
        first, _ = raised(step if rank == 1 else lambda: dist.all_reduce(x))
        second = raised(lambda: dist.broadcast(x, 0))[0] if rank == 1 else ""
        say(first, second)
        assert "called all_reduce" in first + second and "called broadcast" in first + second
        assert x.tolist() == [rank + 1.0] * 5
    """
    assert_codes(run_script(script, 3, tmp_path), 0, 0, 0)


# --- nothing is left -------------------------------------------------------------------------------


@pytest.mark.parametrize("victims", ["all", "first", "others", "while they start"])
def test_crashes_leave_nothing(victims: str, tmp_path: Path) -> None:
    """Others leave their segments in /dev/shm, until there is no room for a start."""
    script = """
        if rank == 0: mark("begun")
        init()
        x = torch.ones(4_000_037)
        dist.all_reduce(x)
        say(*{line.split()[4] for line in open("/proc/self/maps") if "memfd:pycoll" in line})
        mark("up")
        while True: dist.all_reduce(x, dist.ReduceOp.MAX)
    """
    before = set(os.listdir("/dev/shm"))
    segments: set[str] = set()  # by inode
    turns = 20 if os.environ.get("PYCOLL_TEST_FULL") == "1" else 2
    for turn in range(turns):
        directory = tmp_path / str(turn)
        directory.mkdir()
        with Ranks(script, 3, directory) as ranks:
            if victims == "while they start":
                ranks.wait_for_mark("begun", 0)
                time.sleep(0.02 * turn)
            else:
                for rank in range(3):
                    ranks.wait_for_mark("up", rank)
            chosen = {"first": [0], "others": [1, 2]}.get(victims, [0, 1, 2])
            for rank in chosen:
                ranks.signal(rank, signal.SIGKILL)
            ended = ranks.end()
        assert all(rank.code != 0 for rank in ended)
        segments |= {inode for rank in ended for inode in rank.out.split()}
    assert segments or victims == "while they start"
    left = {name for name in set(os.listdir("/dev/shm")) - before if "pycoll" in name}
    assert not left
    assert not mapped(segments)


# --- launchers and signals -------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_is_stopped_ends_its_blocked_ranks(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Others do not answer while they are blocked in native code."""
    path = tmp_path / "job.py"
    path.write_text(
        textwrap.dedent(f"""
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("pycoll")
        rank = dist.get_rank()
        open({str(tmp_path)!r} + f"/pid{{rank}}.tmp", "w").write(str(os.getpid()))
        os.rename({str(tmp_path)!r} + f"/pid{{rank}}.tmp", {str(tmp_path)!r} + f"/pid{{rank}}")
        if rank == 2: time.sleep(600)
        dist.all_reduce(torch.ones(5))
        """)
    )
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone", path],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        pids = [tmp_path / f"pid{rank}" for rank in range(3)]
        wait_until(lambda: all(p.exists() for p in pids), 60, "the job does not come up")
        time.sleep(0.5)
        launcher.send_signal(number)
        stopped = time.monotonic()
        launcher.wait(30)
        assert time.monotonic() - stopped < 20
        for pid in pids:
            assert not Path(f"/proc/{pid.read_text()}").exists()
    finally:
        launcher.kill()
        launcher.communicate()
        for pid in tmp_path.glob("pid?"):
            if Path(f"/proc/{pid.read_text()}").exists():
                os.kill(int(pid.read_text()), signal.SIGKILL)
    assert launcher.returncode != 0


def test_a_launcher_ends_when_a_rank_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        textwrap.dedent("""
        import os, signal, torch, torch.distributed as dist
        dist.init_process_group("pycoll")
        dist.all_reduce(torch.ones(5))
        if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(5))
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone"]
    done = subprocess.run([*command, path], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stderr


def test_the_stack_of_a_blocked_rank_can_be_seen(tmp_path: Path) -> None:
    script = """
        import faulthandler
        init()
        if rank == 1: time.sleep(2)
        else: faulthandler.dump_traceback_later(0.7)
        dist.all_reduce(torch.ones(5))
    """
    ended = run_script(script, 2, tmp_path)
    assert_codes(ended, 0, 0)
    assert "in all_reduce" in ended[0].err
