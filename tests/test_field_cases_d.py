"""Groups and their lifetime: what went wrong for others when groups are foreign, ordered, many or copied.

Groups in general are in `test_groups`, new groups out of old ones in `test_regroup`, exits of the
interpreter in `test_lifetime`.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_runner import all_gather_into_tensor, reduce_scatter_tensor
from scripts import assert_codes, run_script
from torch import Tensor, nn

import pycoll
from pycoll.testing import RankPool

Pools = Callable[[int], RankPool]


# --- on ranks --------------------------------------------------------------------------------------


def calls_on(x: Tensor, group: Any, is_async: bool) -> list[Callable[[], Any]]:
    """Every collective on a group of ranks 0 and 1; x has two elements."""
    how: dict[str, Any] = {"group": group, "async_op": is_async}
    pair = [torch.zeros(2), torch.zeros(2)]
    at_root = dist.get_rank() == 0
    return [
        lambda: dist.all_reduce(x, **how),
        lambda: dist.broadcast(x, 0, **how),
        lambda: dist.reduce(x, 0, **how),
        lambda: all_gather_into_tensor(torch.zeros(4), x, **how),
        lambda: dist.all_gather(pair, x, **how),
        lambda: reduce_scatter_tensor(x, torch.ones(4), **how),
        lambda: dist.reduce_scatter(x, [torch.ones(2)] * 2, **how),
        lambda: dist.gather(x, pair if at_root else None, 0, **how),
        lambda: dist.scatter(x, [torch.ones(2)] * 2 if at_root else None, 0, **how),
        lambda: dist.all_to_all(pair, [torch.ones(2)] * 2, **how),
        lambda: dist.all_to_all_single(x, torch.ones(2), **how),
        lambda: dist.barrier(**how),
    ]


def call_from_outside(is_async: bool) -> tuple[list[str], list[float], int]:
    group = dist.new_group([0, 1])
    x = torch.full((2,), dist.get_rank() + 1.0)
    returned = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls_on(x, group, is_async):
            work = call()
            if work is not None:
                work.wait()
            returned.append("work" if work is not None else "nothing")
    warned = sum("does not belong to" in str(warning.message) for warning in caught)
    assert warned == (12 if dist.get_rank(group) < 0 else 0)
    assert dist.get_rank(group) == (dist.get_rank() if dist.get_rank() < 2 else -1)
    dist.barrier()
    return returned, x.tolist(), dist.get_world_size(group)


def gather_by(ranks: list[int], **options: Any) -> tuple[int, list[float]]:
    """This rank's number in a group of `ranks`, and what the group gathers."""
    group = dist.new_group(ranks, **options)
    if dist.get_rank() not in ranks:
        return -1, []
    gathered = torch.zeros(len(ranks))
    all_gather_into_tensor(gathered, torch.tensor([float(dist.get_rank())]), group=group)
    assert dist.get_process_group_ranks(group) == [int(rank) for rank in gathered]
    return dist.get_rank(group), gathered.tolist()


def gradient_of(model: nn.Module) -> float:
    model.zero_grad()
    (model(torch.ones(1, 2)) * (dist.get_rank() + 1)).sum().backward()
    weight = next(model.parameters())
    assert weight.grad is not None
    return float(weight.grad[0, 0])


def copies_of_a_wrapped_model() -> list[float]:
    """Gradients of a model, of its deep copy, and of what torch.save made of it."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    models = (model, copy.deepcopy(model), loaded, copy.deepcopy(loaded))
    return [gradient_of(each) for each in models for _ in range(2)]


def copies_of_a_group() -> list[str]:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    texts = []
    for thing in (dist.group.WORLD, backend):
        for duplicate in (copy.deepcopy, pickle.dumps):
            try:
                duplicate(thing)
                texts.append("nothing was raised")
            except TypeError as error:
                texts.append(str(error))
    options = copy.deepcopy(backend.options)
    assert (options.algorithm, options._timeout) == (
        backend.options.algorithm,
        backend.options._timeout,
    )
    return texts


# --- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_a_rank_outside_a_group_calls_its_collectives(pool: Pools, is_async: bool) -> None:
    """Others hang, or hand back something that claims to be done; torch's answer is None."""
    zero, one, outside = pool(3).run(call_from_outside, is_async)
    assert outside == (["nothing"] * 12, [3.0, 3.0], -1)
    assert zero[0] == one[0] == (["work"] * 12 if is_async else ["nothing"] * 12)
    # The last to write x are all_to_all_single, which brings ones, and all_reduce before: 1 + 2.
    assert (zero[1], zero[2], one[1], one[2]) == ([1.0, 1.0], 2, [1.0, 1.0], 2)


def test_ranks_of_a_group_are_sorted_unless_asked_not_to(pool: Pools) -> None:
    """Others sort without a word, or keep the given order on some ranks only."""
    assert pool(3).run(gather_by, [2, 0]) == [(0, [0.0, 2.0]), (-1, []), (1, [0.0, 2.0])]


def gather_unsorted() -> tuple[int, list[float]]:
    return gather_by([2, 0, 1], sort_ranks=False)


def test_the_given_order_of_ranks(pool: Pools) -> None:
    order = [2.0, 0.0, 1.0]
    assert pool(3).run(gather_unsorted) == [(1, order), (2, order), (0, order)]


def test_copies_of_a_wrapped_model_train_on(pool: Pools) -> None:
    """Others cannot copy or save it, or reduce the gradients of a copy twice."""
    assert pool(2).run(copies_of_a_wrapped_model) == [[1.5] * 8] * 2


def test_a_group_itself_is_not_copied(pool: Pools) -> None:
    """A copy could not be a member of anything; the error names what was to be copied."""
    for texts in pool(2).run(copies_of_a_group):
        assert all("cannot pickle" in text and "ProcessGroup" in text for text in texts)


def test_options_are_copied_and_pickled() -> None:
    options = pycoll.Options(algorithm="ring", debug="WARN")
    assert copy.deepcopy(options) == options
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.slow
def test_groups_that_are_dropped_without_destroy_are_bounded(tmp_path: Path) -> None:
    """Others lose descriptors and threads with each, and after days there are too many open files."""
    script = """
        import gc, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
        def counts(): return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        init()
        for turn in range(300):
            group = dist.new_group()
            x = torch.full((33,), float(rank)); dist.all_reduce(x, group=group)
            assert x[-1] == 1
            del group
            if turn % 50 == 20: gc.collect()
            if turn == 20: before = counts()
        assert counts() == before, (counts(), before)
        assert not [name for name in os.listdir("/dev/shm") if "pycoll" in name]
    """
    assert_codes(run_script(script, 2, tmp_path), 0, 0)


@pytest.mark.slow
def test_a_limit_of_open_files_is_named(tmp_path: Path) -> None:
    """Others fail without a cause; here every refusal says which limit is too low."""
    script = """
        import resource
        import pycoll.backend; pycoll.backend.extension()
        top = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        for free in range(1, 9):
            os.environ["STORE"] += "x"
            resource.setrlimit(resource.RLIMIT_NOFILE, (top + free, 4096))
            text, _ = raised(lambda: init(timeout=2))
            if text == "nothing was raised": break
            say(text)
    """
    ended = run_script(script, 2, tmp_path)
    assert_codes(ended, 0, 0)
    said = [line for rank in ended for line in rank.out.splitlines()]
    assert any("pycoll" in line for line in said), said
    assert all("open files" in line for line in said), said


@pytest.mark.slow
def test_groups_kept_to_the_very_end_of_the_interpreter(tmp_path: Path) -> None:
    """Others abort when modules are torn down and threads of theirs still hold tensors."""
    script = """
        import builtins, threading
        init()
        class Keeper:
            def __init__(self, group, work):
                self.group, self.work, self.me = group, work, self     # a cycle
            def __del__(self):
                assert self.group.size() == 2
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(100_003), group=group, async_op=True)
        builtins.kept = sys.kept = Keeper(group, work)
        local = threading.local(); local.kept = Keeper(dist.new_group(), None)
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        tensor = torch.ones(3, requires_grad=True)
        tensor.register_hook(lambda grad: dist.all_reduce(grad, group=group))
        (tensor * tensor).sum().backward()
        assert tensor.grad.tolist() == [4.0] * 3
    """
    for turn in range(2):
        directory = tmp_path / str(turn)
        directory.mkdir()
        ended = run_script(script, 2, directory)
        assert_codes(ended, 0, 0)
        assert not any("Exception ignored" in rank.err for rank in ended), ended
