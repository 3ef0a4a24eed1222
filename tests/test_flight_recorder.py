"""What a process says of its last operations: by call, at a failure, at a signal; and torch's tool reads it."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripts import Ranks, assert_codes, run_script

pytestmark = pytest.mark.slow  # each test starts interpreters of its own


def entries_of(path: Path) -> list[dict]:
    record = pickle.loads(path.read_bytes())
    assert (
        json.loads(path.with_name(path.name + ".json").read_text())["version"] == record["version"]
    )
    return record["entries"]


def test_a_record_holds_all_groups_and_what_is_pending(tmp_path: Path) -> None:
    script = """
        import pycoll
        init()
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(5, dtype=torch.int16), 1, group=pair)
        if rank == 0:
            dist.send(torch.ones(7), 1)
            work = dist.all_reduce(torch.ones(100_003), async_op=True)
            time.sleep(0.5)
            say(pycoll.dump_flight_record(os.environ["PREFIX"]))
            dist.barrier(group=pair)
            work.wait()
        else:
            dist.recv(torch.ones(7), 0)
            dist.barrier(group=pair)
            dist.all_reduce(torch.ones(100_003))
            pycoll.dump_flight_record(os.environ["PREFIX"])
    """
    ended = run_script(script, 2, tmp_path, PREFIX=str(tmp_path / "record_"))
    assert_codes(ended, 0, 0)
    assert str(tmp_path / "record_0") in ended[0].out
    found = [
        (e["profiling_name"], e["collective_seq_id"], e["p2p_seq_id"], e["state"], e["input_sizes"])
        for e in entries_of(tmp_path / "record_0")
    ]
    assert found == [
        ("gloo:all_reduce", 1, 0, "completed", [[3]]),
        ("gloo:broadcast", 1, 0, "completed", [[5]]),
        ("gloo:send 0->1", 0, 1, "completed", [[7]]),
        ("gloo:all_reduce", 2, 0, "started", [[100_003]]),
    ]
    other = [e["profiling_name"] for e in entries_of(tmp_path / "record_1")]
    assert other[2:] == ["gloo:recv 1<-0", "gloo:barrier", "gloo:all_reduce"]


def test_a_failure_writes_the_record_and_torchs_tool_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    script = """
        init(timeout=3)
        for _ in range(3): dist.all_reduce(torch.ones(11))
        if rank == 1:
            import pycoll
            pycoll.dump_flight_record(os.environ["PYCOLL_FLIGHT_RECORD"])
            time.sleep(6)
        else:
            say(raised(lambda: dist.all_reduce(torch.ones(11)))[0])
    """
    ended = run_script(script, 2, tmp_path, PYCOLL_FLIGHT_RECORD=str(folder / "rank_"))
    assert_codes(ended, 0, 0)
    assert "Timed out waiting 3000 ms for rank 1" in ended[0].out
    assert "an operation failed: wrote" in ended[0].err
    last = entries_of(folder / "rank_0")[-1]
    assert (last["collective_seq_id"], last["failed"], last["timeout_ms"]) == (4, True, 3000)
    for path in folder.glob("*.json"):
        path.unlink()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.flight_recorder.fr_trace",
        "-p",
        "rank_",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "all_reduce" in text, text
    assert "Not all ranks joining collective" in text, text


def test_a_signal_writes_the_record_of_a_blocked_rank(tmp_path: Path) -> None:
    script = """
        init()
        dist.barrier()
        if rank == 1: time.sleep(4)
        mark("waiting")
        dist.all_reduce(torch.ones(50_021))
    """
    with Ranks(script, 2, tmp_path, PYCOLL_FLIGHT_RECORD=str(tmp_path / "r")) as ranks:
        ranks.wait_for_mark("waiting", 0)
        time.sleep(0.3)
        ranks.signal(0, signal.SIGUSR1)
        ended = ranks.end()
    assert_codes(ended, 0, 0)
    assert "SIGUSR1: wrote" in ended[0].err
    assert [e["state"] for e in entries_of(tmp_path / "r0")] == ["completed", "started"]
    assert not (tmp_path / "r1").exists()
