"""pycoll.testing: what it promises when ranks fail, die, hang or hand back odd things."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from pycoll.testing import (
    RankError,
    RankFailure,
    RankPool,
    check_guards,
    guarded,
    report_progress,
    run_ranks,
)

pytestmark = pytest.mark.slow

# What is tested here belongs to no backend, and gloo is in every torch.
BACKEND = "gloo"


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, BACKEND, timeout=30) as pool:
        yield pool


def rank_and(offset):
    return dist.get_rank() + offset


def summed(value):
    tensor = torch.full((3,), value + dist.get_rank())
    dist.all_reduce(tensor)
    return tensor


def surroundings():
    return torch.get_num_threads(), os.environ.get("PYCOLL_TEST_MARK"), list(sys.path)


def fail_on(rank):
    if dist.get_rank() == rank:
        raise LookupError(f"nothing there for rank {rank}")
    dist.barrier()


def exit_on(rank, code):
    if dist.get_rank() == rank:
        os._exit(code)
    return "survived"


def kill_self_on(rank):
    if dist.get_rank() == rank:
        report_progress("about to go")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_on(rank):
    if dist.get_rank() == rank:
        report_progress("nodding off")
        time.sleep(600)
    return "awake"


def stop_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSTOP)


def echo(value):
    return value


def unpicklable_result():
    return threading.Lock()


class StubbornError(Exception):
    """Can be pickled but not unpickled: its constructor takes two arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raise_stubborn():
    raise StubbornError("this", "that")


def hang_at_exit():
    threading.Thread(target=time.sleep, args=(600,)).start()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_in_rank_order():
    assert run_ranks(rank_and, 3, 10, backend=BACKEND) == [10, 11, 12]


def test_a_tcp_store_and_tensors_as_results():
    first, second = run_ranks(summed, 2, 1.0, backend=BACKEND, store="tcp")
    assert first.tolist() == second.tolist() == [3.0, 3.0, 3.0]


def test_a_pool_keeps_its_processes(pool):
    assert pool.run(rank_and, 5) == [5, 6]
    pids = pool.pids
    assert pool.run(summed, 0.5)[1].tolist() == [2.0, 2.0, 2.0]
    assert pool.pids == pids


def test_ranks_have_one_thread_and_the_callers_environment(monkeypatch):
    monkeypatch.setenv("PYCOLL_TEST_MARK", "set later than the server started")
    for threads, mark, path in run_ranks(surroundings, 2, backend=BACKEND):
        assert threads == 1
        assert mark == "set later than the server started"
        assert path == sys.path
    monkeypatch.delenv("PYCOLL_TEST_MARK")
    assert run_ranks(surroundings, 1, backend=BACKEND)[0][1] is None
    given = run_ranks(surroundings, 1, backend=BACKEND, env={"PYCOLL_TEST_MARK": "given"})
    assert given[0][1] == "given"


def test_the_first_failure_is_raised_and_the_pool_starts_again(pool):
    pids = pool.pids
    with pytest.raises(RankError, match="nothing there for rank 1") as caught:
        pool.run(fail_on, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, LookupError)
    assert "in fail_on" in str(caught.value), "the traceback shows where"
    assert "test_testing.fail_on on 2 ranks: rank 1 raised" in str(caught.value)
    assert not any(is_running(pid) for pid in pids)
    assert pool.run(rank_and, 0) == [0, 1]


def test_a_rank_that_dies_is_named_with_its_signal_or_code(pool):
    with pytest.raises(RankError, match="rank 0 died\nexited with code 3"):
        pool.run(exit_on, 0, 3)
    with pytest.raises(RankError, match="rank 1 died\nkilled by SIGKILL, last at 'about to go'"):
        pool.run(kill_self_on, 1)


def test_failures_can_be_returned():
    first, second = run_ranks(exit_on, 2, 1, 0, backend=BACKEND, return_failures=True)
    assert first == "survived"
    assert isinstance(second, RankFailure)
    assert (second.rank, second.kind, second.text) == (1, "died", "exited with code 0")


@pytest.mark.parametrize("fn", [sleep_on, stop_on])
def test_a_rank_stuck_at_the_deadline_is_killed(pool, fn):
    pool.start()
    pids = pool.pids
    with pytest.raises(RankError, match="rank 1 stuck\nstill running at the deadline") as caught:
        pool.run(fn, 1, timeout=2)
    assert not any(is_running(pid) for pid in pids)
    if fn is sleep_on:
        assert "last at 'nodding off'" in str(caught.value)
        assert "in sleep_on" in str(caught.value), "its stack is shown"


def test_what_cannot_be_pickled_is_an_error_of_its_rank(pool):
    with pytest.raises(RankError, match=r"cannot pickle '_thread\.lock'"):
        pool.run(unpicklable_result)
    with pytest.raises(RankError, match="StubbornError: this and that") as caught:
        pool.run(raise_stubborn)
    assert caught.value.__cause__ is None
    with pytest.raises((AttributeError, TypeError), match="lambda"):
        pool.run(lambda: None)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.uint16, torch.complex32, torch.bool])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_every_dtype_and_layout_travel_by_value(pool, dtype):
    tensor = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype)
    for sent in (tensor, tensor.t(), tensor[0, 1], tensor[:0], tensor[:, :1].expand(2, 3)):
        for received in pool.run(echo, sent):
            assert received.dtype == dtype
            assert received.is_contiguous()
            assert received.tolist() == sent.tolist()
    assert pool.run(echo, torch.ones(2, requires_grad=True))[0].requires_grad
    sparse = torch.eye(2).to_sparse()
    assert pool.run(echo, sparse)[1].to_dense().tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_an_unknown_backend_is_reported_by_the_start():
    with pytest.raises(RankError, match="starting 2 ranks with backend 'no_such'"):
        run_ranks(rank_and, 2, 0, backend="no_such")


def test_a_rank_that_hangs_on_its_way_out_is_reported(monkeypatch):
    monkeypatch.setattr("pycoll.testing.rank_pool.EXIT_S", 1.0)
    with pytest.raises(RankError, match="ending 1 ranks: rank 0 stuck"):
        run_ranks(hang_at_exit, 1, backend=BACKEND)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128, torch.bool])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((7,), None), ((7,), (2,)), ((3, 5), (1, 3)), ((), None), ((0,), None), ((4, 3), (1, 0))],
)
def test_guards_see_any_byte_outside_the_elements(dtype, shape, strides):
    values = torch.ones(shape).to(dtype)
    view = guarded(values, strides=strides, offset_bytes=3 * values.element_size())
    assert torch.equal(view, values)
    check_guards(view)
    view.zero_()
    check_guards(view)
    storage = view.untyped_storage()
    everything = torch.arange(len(storage) // values.element_size())
    start = view.storage_offset()
    covered = torch.as_strided(everything, view.shape, view.stride(), start)
    elements = {0, start - 1, start + 1, start + 2, len(everything) - 1}
    for element in elements - set(covered.flatten().tolist()):
        position = element * values.element_size()
        before, storage[position] = storage[position], 1
        with pytest.raises(AssertionError, match="1 bytes outside the tensor were written"):
            check_guards(view)
        storage[position] = before
    check_guards(view)


def test_views_of_one_guarded_tensor_are_checked_together():
    whole = guarded(torch.zeros(6))
    check_guards(whole[:2], whole[2:])
    with pytest.raises(AssertionError):
        check_guards(whole[:2])
    with pytest.raises(ValueError, match="share their storage"):
        check_guards(whole, torch.zeros(6))


def test_an_offset_that_is_no_multiple_of_the_item_size_is_refused():
    with pytest.raises(ValueError, match="multiple of the item size 4; got 6"):
        guarded(torch.zeros(3), offset_bytes=6)
