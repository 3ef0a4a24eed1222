"""Peers that die, stop, come late or leave; deadlines; Ctrl-C. Survivors say who and what."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from scripts import Ranks, assert_codes, run_script

pytestmark = pytest.mark.slow  # each test starts interpreters of its own

KILLED = -signal.SIGKILL


@pytest.mark.parametrize("numel", [1, 3_000_017])
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce_scatter", "barrier"])
def test_survivors_name_the_killed_rank(collective: str, numel: int, tmp_path: Path) -> None:
    script = f"""
        init()
        x, y = torch.ones({numel} * world_size), torch.ones({numel})
        calls = dict(all_reduce=lambda: dist.all_reduce(x), broadcast=lambda: dist.broadcast(x, 1),
                     reduce_scatter=lambda: dist.reduce_scatter_tensor(y, x), barrier=dist.barrier)
        call = calls[{collective!r}]
        call()
        if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        text, took = raised(call)
        say(text)
        assert took < 5, took
    """
    ended = run_script(script, 3, tmp_path)
    assert_codes(ended, 0, KILLED, 0)
    for survivor in (ended[0], ended[2]):
        assert "DistBackendError" in survivor.out
        assert collective in survivor.out
        assert "rank 1 (pid " in survivor.out
        assert "died" in survivor.out


def test_killed_in_the_middle_of_a_stream_of_operations(tmp_path: Path) -> None:
    script = """
        init()
        x = torch.ones(4_000_037)
        def loop():
            for i in range(100000):
                if i == 3: mark("busy")
                dist.all_reduce(x, op=dist.ReduceOp.MAX)
        text, _ = raised(loop)
        say(text)
    """
    with Ranks(script, 3, tmp_path) as ranks:
        ranks.wait_for_mark("busy", 1)
        ranks.signal(1, signal.SIGKILL)
        killed = time.monotonic()
        ended = ranks.end()
        assert time.monotonic() - killed < 10
    assert_codes(ended, 0, KILLED, 0)
    for survivor in (ended[0], ended[2]):
        assert "rank 1" in survivor.out, survivor.out
        assert "all_reduce" in survivor.out, survivor.out


def test_receiver_names_a_killed_sender_and_still_gets_what_was_sent(tmp_path: Path) -> None:
    script = """
        init()
        x = torch.zeros(11)
        if rank == 1:
            dist.send(torch.arange(11.0), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        dist.recv(x, 1)
        assert x.tolist() == list(range(11))
        text, took = raised(lambda: dist.recv(x, 1))
        assert "rank 1 (pid " in text and "receive from rank 1" in text and took < 5, text
    """
    assert_codes(run_script(script, 2, tmp_path), 0, KILLED)


def test_stopped_rank_is_named_at_the_deadline(tmp_path: Path) -> None:
    script = """
        init(timeout=2)
        x = torch.ones(5); dist.all_reduce(x)
        if rank == 1:
            mark("stop"); time.sleep(600)
        text, took = raised(lambda: dist.all_reduce(x))
        say(text)
        assert 1.9 < took < 4, took
    """
    with Ranks(script, 2, tmp_path) as ranks:
        ranks.wait_for_mark("stop", 1)
        ranks.signal(1, signal.SIGSTOP)
        ranks.processes[0].wait(timeout=60)
        out, err = ranks.processes[0].communicate()
    assert ranks.processes[0].returncode == 0, err
    assert "rank 0 timed out in all_reduce (one_shot), operation 2 of the group" in out
    assert "Timed out waiting 2000 ms for rank 1" in out


def test_a_rank_continued_in_time_is_no_fault(tmp_path: Path) -> None:
    script = """
        init(timeout=30)
        dist.barrier()
        if rank == 1: mark("stop")
        for i in range(2000):
            x = torch.full((3001,), rank + 1.0); dist.all_reduce(x)
            assert x[-1] == 3
            if rank == 1 and i == 100: mark("running")
    """
    with Ranks(script, 2, tmp_path) as ranks:
        ranks.wait_for_mark("running", 1)
        ranks.signal(1, signal.SIGSTOP)
        time.sleep(1.5)
        ranks.signal(1, signal.SIGCONT)
        assert_codes(ranks.end(), 0, 0)


def test_a_wait_that_timed_out_can_be_repeated(tmp_path: Path) -> None:
    script = """
        init()
        for numel in (3, 1_000_003):
            dist.barrier()
            if rank == 1: time.sleep(1.5)
            x = torch.full((numel,), rank + 1.0)
            work = dist.all_reduce(x, async_op=True)
            if rank == 0:
                text, took = raised(lambda: work.wait(seconds(0.3)))
                assert "Timed out waiting 300 ms" in text and took < 1.4, (text, took)
                assert not work.is_completed()
            work.wait()
            assert x[0] == 3 and x[-1] == 3
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)


def test_timeout_of_a_call_and_of_a_group(tmp_path: Path) -> None:
    script = """
        init()
        short = dist.new_group(timeout=seconds(0.5))
        if rank == 1:
            time.sleep(3)
        else:
            text, took = raised(lambda: dist.all_reduce(torch.ones(1), group=short))
            assert "Timed out waiting 500 ms for rank 1" in text and 0.4 < took < 2, (text, took)
            text, took = raised(lambda: dist.all_reduce(torch.ones(1), group=short))
            assert "this group can no longer be used" in text and took < 0.2, (text, took)
            backend = dist.group.WORLD._get_backend(torch.device("cpu"))
            options = dist.AllreduceOptions(); options.timeout = seconds(0)
            text, took = raised(lambda: backend.allreduce([torch.ones(1)], options).wait())
            assert "Timed out waiting 0 ms" in text and took < 1, (text, took)
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)


def test_missing_rank_is_named_when_a_group_is_made(tmp_path: Path) -> None:
    script = """
        if rank == 1: sys.exit(0)
        text, took = raised(lambda: init(timeout=2))
        say(text); assert took < 20
    """
    ended = run_script(script, 3, tmp_path)
    assert_codes(ended, 0, 0, 0)
    assert "1" in ended[0].out
    assert "imed out" in ended[0].out


def test_ctrl_c_ends_a_blocked_call_at_once(tmp_path: Path) -> None:
    script = """
        init()
        dist.barrier()
        if rank == 1:
            time.sleep(600)
        mark("waiting")
        begin = time.monotonic()
        try:
            dist.all_reduce(torch.ones(3))
        except KeyboardInterrupt:
            say("interrupted")
        text, _ = raised(lambda: dist.all_reduce(torch.ones(3)))
        assert "was interrupted by a signal in all_reduce" in text, text
    """
    with Ranks(script, 2, tmp_path) as ranks:
        ranks.wait_for_mark("waiting", 0)
        time.sleep(0.3)
        ranks.signal(0, signal.SIGINT)
        begin = time.monotonic()
        ranks.processes[0].wait(timeout=30)
        assert time.monotonic() - begin < 5
        out, err = ranks.processes[0].communicate()
        assert ranks.processes[0].returncode == 0, err
        assert "interrupted" in out, err


def test_ctrl_c_in_a_wait_leaves_the_operation_going_on(tmp_path: Path) -> None:
    script = """
        init()
        dist.barrier()
        if rank == 1: time.sleep(2)
        x = torch.full((100_003,), rank + 1.0)
        work = dist.all_reduce(x, async_op=True)
        if rank == 0:
            mark("waiting")
            try:
                work.wait()
            except KeyboardInterrupt:
                say("interrupted")
        work.wait()
        assert x[-1] == 3
    """
    with Ranks(script, 2, tmp_path) as ranks:
        ranks.wait_for_mark("waiting", 0)
        time.sleep(0.3)
        ranks.signal(0, signal.SIGINT)
        ended = ranks.end()
    assert_codes(ended, 0, 0)
    assert "interrupted" in ended[0].out


def test_sigterm_ends_a_blocked_rank(tmp_path: Path) -> None:
    script = """
        init()
        dist.barrier()
        if rank == 0: mark("waiting"); dist.all_reduce(torch.ones(100_003))
        text, _ = raised(lambda: (time.sleep(1), dist.all_reduce(torch.ones(100_003)))); say(text)
    """
    with Ranks(script, 2, tmp_path) as ranks:
        ranks.wait_for_mark("waiting", 0)
        ranks.signal(0, signal.SIGTERM)
        ended = ranks.end()
    assert_codes(ended, -signal.SIGTERM, 0)
    assert "rank 0 (pid" in ended[1].out


def test_abort_from_another_thread(tmp_path: Path) -> None:
    script = """
        import threading
        init()
        dist.barrier()
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        if rank == 0:
            threading.Timer(0.5, backend.abort).start()
            text, took = raised(lambda: dist.all_reduce(torch.ones(100_003)))
            assert "rank 0 aborted the group" in text and took < 5, (text, took)
        else:
            time.sleep(1.5)
            text, took = raised(lambda: dist.all_reduce(torch.ones(100_003)))
            assert "rank 0" in text and "aborted the group" in text and took < 2, (text, took)
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)
