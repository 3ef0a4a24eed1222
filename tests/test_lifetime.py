"""Groups and interpreters that end: exit codes, pending work, forks, nothing left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from scripts import assert_codes, run_script

pytestmark = pytest.mark.slow  # each test starts interpreters of its own


def no_shared_memory_left() -> bool:
    return not [name for name in os.listdir("/dev/shm") if "pycoll" in name]


def test_exit_without_destroy(tmp_path: Path) -> None:
    ended = run_script("init(); x = torch.ones(100_003); dist.all_reduce(x)", 2, tmp_path)
    assert_codes(ended, 0, 0)
    assert all(rank.err == "" or "Traceback" not in rank.err for rank in ended)
    assert no_shared_memory_left()


def test_exit_with_work_that_nobody_waited_for(tmp_path: Path) -> None:
    script = """
        init()
        kept = torch.ones(1_000_003)
        work = dist.all_reduce(kept, async_op=True)
        dist.all_reduce(torch.ones(1_000_003), async_op=True)   # the tensor is dropped at once
        dist.all_reduce(torch.ones(3), async_op=True)
    """
    for turn in range(3):
        directory = tmp_path / str(turn)
        directory.mkdir()
        assert_codes(run_script(script, 2, directory), 0, 0)


def test_atexit_barrier(tmp_path: Path) -> None:
    script = """
        import atexit
        atexit.register(lambda: (dist.barrier(), say("barrier passed")))
        init()
        atexit.register(lambda: dist.all_reduce(torch.ones(2)))
    """
    ended = run_script(script, 2, tmp_path)
    assert_codes(ended, 0, 0)
    assert all("barrier passed" in rank.out for rank in ended)


def test_only_one_rank_destroys(tmp_path: Path) -> None:
    script = """
        init(); x = torch.ones(7); dist.all_reduce(x)
        if rank == 0: dist.destroy_process_group()
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)


def test_sys_exit_while_the_other_waits(tmp_path: Path) -> None:
    script = """
        init()
        if rank == 1: sys.exit(3)
        dist.all_reduce(torch.ones(1))
    """
    ended = run_script(script, 2, tmp_path)
    assert_codes(ended, 1, 3)
    assert "rank 1" in ended[0].err
    assert "all_reduce" in ended[0].err


def test_a_rank_that_raises_does_not_wait_for_the_others(tmp_path: Path) -> None:
    script = """
        init()
        if rank == 1:
            mark("raise")
            raise RuntimeError("no data here")
        text, took = raised(lambda: dist.all_reduce(torch.ones(1)))
        say(text)
        assert took < 10, took
    """
    ended = run_script(script, 3, tmp_path)
    assert_codes(ended, 0, 1, 0)
    assert "no data here" in ended[1].err
    assert "rank 1" in ended[0].out
    assert "rank 1" in ended[2].out


def test_destroy_and_init_again_many_times(tmp_path: Path) -> None:
    script = """
        def counts(): return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        for turn in range(20):
            os.environ["STORE"] += "x"
            init()
            x = torch.full((1000 + turn,), float(rank)); dist.all_reduce(x, async_op=True).wait()
            assert x.sum() == 1000 + turn
            dist.destroy_process_group()
            if turn == 4: before = counts()
        assert counts() == before, (counts(), before)
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)
    assert no_shared_memory_left()


def test_a_world_is_made_again_on_the_same_store(tmp_path: Path) -> None:
    """Names are the same each time; what the last one has left in the store must not be taken for the new one's."""
    script = """
        store = dist.FileStore(os.environ["STORE"], world_size)
        for turn in range(4):
            dist.init_process_group("pycoll", store=store, rank=rank, world_size=world_size,
                                    timeout=seconds(10))
            if turn % 2 == 0 and rank == 1: time.sleep(0.2)
            group = dist.new_group([0, 2])
            x = torch.full((70_001,), rank + turn + 1.0)
            if rank != 1:
                dist.all_reduce(x, group=group)
                assert (x == 2 * turn + 4).all(), x
            dist.all_reduce(x)
            dist.destroy_process_group()
    """
    assert_codes(run_script(script, 3, tmp_path), 0, 0, 0)


def test_destroy_twice_and_use_after_destroy(tmp_path: Path) -> None:
    script = """
        init()
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        backend.shutdown(); backend.shutdown()
        text, _ = raised(lambda: dist.all_reduce(torch.ones(1)))
        assert "this group has been destroyed; make a new one" in text, text
        dist.destroy_process_group()
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)


def test_hundreds_of_groups_leave_nothing(tmp_path: Path) -> None:
    script = """
        def counts(): return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        def rss(): return int(open("/proc/self/statm").read().split()[1]) * 4096
        init()
        for turn in range(300):
            group = dist.new_group()
            x = torch.full((33,), float(rank)); dist.all_reduce(x, group=group)
            assert x[0] == 1
            dist.destroy_process_group(group)
            if turn == 20: before, memory = counts(), rss()
        assert counts() == before, (counts(), before)
        assert rss() - memory < 32 << 20, (rss() - memory)
        kept = [dist.new_group() for _ in range(100)]
        assert counts() == before, (counts(), before)       # groups share what they need
        for group in kept: dist.all_reduce(x, group=group)
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)


def test_forked_child_cannot_use_the_parents_group_nor_break_it(tmp_path: Path) -> None:
    script = """
        init()
        x = torch.ones(100_003); dist.all_reduce(x, async_op=True).wait()
        pid = os.fork()
        if pid == 0:
            text, _ = raised(lambda: dist.all_reduce(x))
            ok = "belongs to the parent process" in text
            dist.destroy_process_group()
            sys.exit(0 if ok else 5)     # a real exit of the interpreter, with its destructors
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        dist.all_reduce(x)
        assert x[0] == 4
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)


def test_forked_children_make_a_world_of_their_own(tmp_path: Path) -> None:
    script = """
        init()
        dist.all_reduce(torch.ones(100_003), async_op=True).wait()
        pid = os.fork()
        if pid == 0:
            os.environ["STORE"] += ".child"
            dist.destroy_process_group()
            init()
            x = torch.full((100_003,), float(rank)); dist.all_reduce(x, async_op=True).wait()
            dist.destroy_process_group()
            sys.exit(0 if x.sum() == 100_003 else 5)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        x = torch.ones(3); dist.all_reduce(x); assert x[0] == 2
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)


def test_data_loader_workers_come_and_go(tmp_path: Path) -> None:
    script = """
        from torch.utils.data import DataLoader, TensorDataset
        init()
        data = TensorDataset(torch.arange(64.0))
        for epoch in range(2):
            for (batch,) in DataLoader(data, batch_size=8, num_workers=2):
                dist.all_reduce(batch)
        assert batch[-1] == 126
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)


def test_two_jobs_at_once(tmp_path: Path) -> None:
    from scripts import Ranks

    script = """
        init()
        for i in range(200):
            x = torch.full((1000 + i,), rank + 1.0 + float(os.environ["JOB"])); dist.all_reduce(x)
            assert x[-1] == 3 + 2 * float(os.environ["JOB"])
    """
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        Ranks(script, 2, tmp_path / "a", JOB="10") as first,
        Ranks(script, 2, tmp_path / "b", JOB="20") as second,
    ):
        assert_codes(first.end(), 0, 0)
        assert_codes(second.end(), 0, 0)


def test_exits_are_prompt(tmp_path: Path) -> None:
    """Work that can never complete holds an exit up by a second at most, not by its timeout."""
    script = """
        init(timeout=600)
        dist.barrier()
        if rank == 0:
            dist.all_reduce(torch.ones(1_000_003), async_op=True)
            mark("issued")
        else:
            time.sleep(6)
    """
    from scripts import Ranks

    with Ranks(script, 2, tmp_path) as ranks:
        ranks.wait_for_mark("issued", 0)
        begin = time.monotonic()
        ranks.processes[0].wait(timeout=30)
        assert time.monotonic() - begin < 5
        assert_codes(ranks.end(), 0, 0)


@pytest.mark.parametrize("call", ["recv", "all_reduce", "wait"])
def test_exit_while_a_thread_is_blocked(call: str, tmp_path: Path) -> None:
    """Others abort: the interpreter ends the thread as soon as that one asks for its lock."""
    script = f"""
        import threading
        init()
        calls = dict(recv=lambda: dist.recv(torch.ones(3), 1 - rank),
                     all_reduce=lambda: dist.all_reduce(torch.ones(3)),
                     wait=lambda: dist.irecv(torch.ones(3), 1 - rank).wait())
        dist.barrier()
        if {call!r} != "all_reduce" or rank == 0:
            threading.Thread(target=calls[{call!r}], daemon=True).start()
        time.sleep(0.5)
    """
    ended = run_script(script, 2, tmp_path)
    assert_codes(ended, 0, 0)
    assert not any("terminate" in rank.err for rank in ended), ended
