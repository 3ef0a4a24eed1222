"""Ordinary tensors in memory that peers map: who gets it, fork, limits, what is left after a kill."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from case_runner import BACKEND
from scripts import Ranks, assert_codes, run_script

import pycoll

pytestmark = pytest.mark.skipif(BACKEND != "pycoll", reason="memory of pycoll")

LEAST = 16 * 1024  # bytes of a storage that stays with torch


def test_within_the_block_large_tensors_are_shared() -> None:
    before = torch.ones(LEAST)
    with pycoll.shared_allocator():
        small, large = torch.zeros(LEAST // 4), torch.zeros(LEAST // 4 + 1)
        computed = large * 2 + 1
        with pycoll.shared_allocator(False):
            inner = torch.ones(LEAST)
    after = torch.ones(LEAST)
    assert [pycoll.is_shared(t) for t in (large, computed)] == [True, True]
    assert not any(pycoll.is_shared(t) for t in (before, small, inner, after))
    assert computed.eq(1).all()
    # A tensor keeps its allocator when it grows.
    large.resize_(1 << 20).fill_(3)
    assert large.sum() == 3 << 20


def test_other_threads_are_not_concerned() -> None:
    found: list[bool] = []
    with pycoll.shared_allocator():
        thread = threading.Thread(target=lambda: found.append(pycoll.is_shared(torch.ones(LEAST))))
        thread.start()
        thread.join()
    assert found == [False]


def test_memory_is_counted_and_given_back() -> None:
    before = pycoll.shared_memory_stats()
    tensor = pycoll.symmetric_empty(1 << 20, dtype=torch.uint8)
    during = pycoll.shared_memory_stats()
    assert during["num_blocks"] == before["num_blocks"] + 1
    assert during["bytes_in_use"] == before["bytes_in_use"] + (1 << 20)
    del tensor
    assert pycoll.shared_memory_stats()["bytes_cached"] >= 1 << 20
    pycoll.release_cached_shared_memory()
    after = pycoll.shared_memory_stats()
    assert (after["bytes_cached"], after["num_blocks"]) == (0, before["num_blocks"])


def test_symmetric_empty_takes_what_empty_takes() -> None:
    for size, shape in (((3, 5), (3, 5)), (([2, 0, 7],), (2, 0, 7)), ((), ()), (((4,),), (4,))):
        tensor = pycoll.symmetric_empty(*size, dtype=torch.int16)
        assert tuple(tensor.shape) == shape
        assert tensor.dtype == torch.int16
        assert tensor.is_contiguous()
    assert pycoll.symmetric_empty(3).dtype == torch.get_default_dtype()
    assert pycoll.symmetric_empty(3, requires_grad=True).requires_grad
    with pytest.raises(ValueError, match=r"size is \(3, -1\)"):
        pycoll.symmetric_empty(3, -1)


# --- real processes --------------------------------------------------------------------------------


@pytest.mark.slow
def test_for_the_whole_process_by_the_environment(tmp_path: Path) -> None:
    script = """
        import threading, pycoll
        x = torch.full((70001,), rank + 1.0)
        init()
        dist.all_reduce(x)
        assert x[-1] == 3 and pycoll.events()[-1]["memory_path"] == "mapped"
        found = []
        def look(): found.append(pycoll.is_shared(torch.ones(5000)))
        thread = threading.Thread(target=look); thread.start(); thread.join()
        assert found == [True]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 100))
        model(torch.ones(4, 300)).sum().backward()
        assert pycoll.events()[-1]["memory_path"] == "mapped"
        pycoll.use_shared_allocator(False)
        assert not pycoll.is_shared(torch.ones(5000))
    """
    assert_codes(run_script(script, 2, tmp_path, PYCOLL_SHARED_ALLOC="1"), 0, 0)


@pytest.mark.slow
def test_a_wrong_value_is_named_and_torch_still_imported(tmp_path: Path) -> None:
    (ended,) = run_script("say('there')", 1, tmp_path, PYCOLL_SHARED_ALLOC="yes")
    assert ended.out == "there\n"
    assert "PYCOLL_SHARED_ALLOC is 'yes'" in ended.err


@pytest.mark.slow
def test_a_forked_child(tmp_path: Path) -> None:
    """It sees what it has inherited, makes plain tensors, and frees nothing."""
    script = """
        import gc, pycoll
        init()
        x = torch.full((70001,), rank + 1.0)
        y = torch.full((70001,), 7.0)
        assert pycoll.is_shared(x)
        blocks = pycoll.shared_memory_stats()["num_blocks"]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                x[5] = 100.0 + rank
                z = torch.ones(70001)
                assert not pycoll.is_shared(z) and not pycoll.is_shared(x)
                del y, z; gc.collect()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pycoll.shared_memory_stats()["num_blocks"] == blocks
        again = [torch.full((70001,), 9.0) for _ in range(3)]
        assert y.eq(7).all() and x[5] == 100 + rank
        dist.all_reduce(x)
        assert x[5] == 201 and x[6] == 3
        data = [(torch.full((9001,), float(i)), i) for i in range(6)]
        loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1)
        assert [b[0][1, -1].item() for b in loader] == [1, 3, 5]
    """
    assert_codes(run_script(script, 2, tmp_path, PYCOLL_SHARED_ALLOC="1"), 0, 0)


@pytest.mark.slow
def test_a_child_that_makes_groups_of_its_own(tmp_path: Path) -> None:
    script = """
        import pycoll
        x = pycoll.symmetric_empty(70001).fill_(rank + 1.0)
        if os.fork() == 0:
            init()
            dist.all_reduce(x)
            assert x[-1] == 3 and pycoll.events()[-1]["memory_path"] == "readv"
            y = pycoll.symmetric_empty(70001).fill_(rank + 1.0)
            dist.all_reduce(y)
            assert y[-1] == 3 and pycoll.events()[-1]["memory_path"] == "mapped"
            del x
            dist.destroy_process_group()
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        assert x[-1] == 3  # shared with the child
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)


@pytest.mark.slow
def test_without_room_tensors_are_plain(tmp_path: Path) -> None:
    script = """
        import pycoll
        init()
        x = torch.full((10_000_019,), rank + 1.0)
        assert not pycoll.is_shared(x)
        y = torch.full((70001,), rank + 1.0)
        assert pycoll.is_shared(y)
        dist.all_reduce(x); dist.all_reduce(y)
        assert x[-1] == 3 and y[-1] == 3
        text, _ = raised(lambda: pycoll.symmetric_empty(10_000_019))
        assert "of the 33554432 that are reserved" in text and "PYCOLL_SEGMENT_BYTES" in text, text
    """
    ended = run_script(
        script, 2, tmp_path, PYCOLL_SHARED_ALLOC="1", PYCOLL_SEGMENT_BYTES=str(32 << 20)
    )
    assert_codes(ended, 0, 0)
    assert ended[0].err.count("is not allocated in shared memory") == 1


@pytest.mark.slow
def test_a_world_made_again_reaches_older_tensors(tmp_path: Path) -> None:
    script = """
        import pycoll
        init()
        x = pycoll.symmetric_empty(70001)
        for turn in range(3):
            x.fill_(rank + turn); dist.all_reduce(x)
            assert x[-1] == 1 + 2 * turn and pycoll.events()[-1]["memory_path"] == "mapped"
            # A file of its own: the last rank that leaves a world removes that world's.
            dist.destroy_process_group(); os.environ["STORE"] += "+"; init()
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["pycoll.symmetric_empty", "torch.empty"])
def test_killed_in_the_middle_of_direct_access(memory: str, tmp_path: Path) -> None:
    """Survivors name the dead rank; nothing is left of its memory."""
    script = f"""
        import pycoll
        init()
        x = {memory}(4_000_037).fill_(1)
        def loop():
            for i in range(100000):
                if i == 3: mark("busy")
                dist.all_reduce(x, op=dist.ReduceOp.MAX)
        text, _ = raised(loop)
        say(text)
        say(pycoll.events()[0]["memory_path"])
    """
    before = set(os.listdir("/dev/shm"))
    with Ranks(script, 3, tmp_path) as ranks:
        ranks.wait_for_mark("busy", 1)
        ranks.signal(1, signal.SIGKILL)
        ended = ranks.end()
    assert_codes(ended, 0, -signal.SIGKILL, 0)
    for survivor in (ended[0], ended[2]):
        assert "rank 1" in survivor.out, survivor.out
        assert "all_reduce" in survivor.out, survivor.out
        assert survivor.out.split()[-1] == ("readv" if memory == "torch.empty" else "mapped")
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "pycoll" in name}


@pytest.mark.slow
def test_killed_before_a_barrier_of_symmetric_memory(tmp_path: Path) -> None:
    script = """
        import torch.distributed._symmetric_memory as symm_mem
        init()
        x = symm_mem.empty(11, device="cpu")
        handle = symm_mem.rendezvous(x, dist.group.WORLD)
        handle.barrier()
        if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        text, took = raised(handle.barrier)
        assert "rank 1 (pid " in text and "died" in text and took < 5, (text, took)
    """
    assert_codes(run_script(script, 2, tmp_path), 0, -signal.SIGKILL)


@pytest.mark.slow
def test_fsdp2_takes_its_buffers_from_the_backend(tmp_path: Path) -> None:
    script = """
        import pycoll
        from torch.distributed.fsdp import fully_shard
        init()
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 128))
        alone = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 128))
        alone.load_state_dict(model.state_dict())
        for layer in model: fully_shard(layer)
        fully_shard(model)
        for module in (*model, model): module.set_allocate_memory_from_process_group_for_comm(True)
        data = torch.arange(4 * 256).reshape(4, 256).remainder(17).float()
        model(data[2 * rank : 2 * rank + 2]).sum().backward()
        alone(data).sum().div(2).backward()
        for sharded, whole in zip(model.parameters(), alone.parameters()):
            torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)
        paths = {(e["operation"], e["memory_path"]) for e in pycoll.events() if e["nbytes"] > 65536}
        assert ("all_gather", "mapped") in paths and ("reduce_scatter", "mapped") in paths, paths
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)
