"""Runs cases of the matrix on the ranks of a pool, many in one call, and names those that fail."""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from checker import Trial, build_trial, verify
from generator import ROOTED, Case

from pycoll.testing import RankError, RankPool, report_progress

BACKEND = os.environ.get("PYCOLL_TEST_BACKEND", "pycoll")

# Named differently before torch 2.13, where the old names began to warn.
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Operations in flight at once where waits come in reverse order.
NUM_IN_FLIGHT = 3
# Cases at which a rank died or hung, before the rest of a batch is given up.
MAX_STOPS = 3
# Of a traceback, the last ones: the first are the same for all cases.
NUM_FRAMES = 3
BATCH_TIMEOUT_S = 240.0

# How the tensors of a case lie in memory, by name: the value of PYCOLL_MEMORY_PATH for its groups, and the
# ranks (remainders modulo 2) that make them in memory that their peers map.
MEMORY: dict[str, tuple[str, tuple[int, ...]]] = {
    "plain": ("auto", ()),
    "staged": ("staged", ()),
    "shared": ("auto", (0, 1)),
    "half shared": ("auto", (1,)),
    "half shared, half staged": ("mapped", (1,)),
}


def reduce_op(op: str, factor: float | None = None) -> Any:
    """torch's object for one of `reference.OPS`; of "none", the default.

    factor: of premul_sum, 0.5 unless given.
    """
    if op == "premul_sum":
        return dist._make_nccl_premul_sum(0.5 if factor is None else factor)
    return getattr(dist.ReduceOp, "SUM" if op == "none" else op.upper())


def failures_of(pool: RankPool, cases: Sequence[Case], memory: str = "plain") -> dict[str, str]:
    """Run all cases, in as few calls as possible; the id of each that failed, with what was said.

    memory: one of MEMORY.

    A rank that dies or hangs costs its case; the cases before and after it run again on new ranks.
    """
    failures: dict[str, str] = {}
    batches = [list(cases)]
    num_stops = 0
    while batches:
        batch = batches.pop()
        if num_stops > MAX_STOPS:
            failures.update((case.id, "not run: ranks died or hung too often") for case in batch)
            continue
        try:
            reports = pool.run(run_cases, batch, memory, timeout=BATCH_TIMEOUT_S)
        except RankError as error:
            num_stops += 1
            text = str(error)
            at = next((i for i, c in enumerate(batch) if f"last at {c.id!r}" in text), None)
            if at is None:
                raise
            failures[batch[at].id] = text
            batches += [part for part in (batch[at + 1 :], batch[:at]) if part]
        else:
            for rank, failed in enumerate(reports):
                for name, text in failed.items():
                    failures.setdefault(name, f"rank {rank}: {text}")
            if any(reports):
                pool.kill()  # a group in which something failed is no ground for other tests
    return failures


def run_cases(cases: Sequence[Case], memory: str = "plain") -> dict[str, str]:
    """On a rank: the id of every case that failed here, with the reason."""
    failed = {}
    for case in cases:
        report_progress(case.id)
        try:
            run_case(case, memory)
        except AssertionError as error:
            failed[case.id] = str(error)
        except Exception as error:
            failed[case.id] = "".join(traceback.format_exception(error)[-NUM_FRAMES - 1 :])
    for group in _groups.values():
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    _groups.clear()
    return failed


def run_case(case: Case, memory: str = "plain") -> None:
    """On a rank: all roots of a rooted collective; several operations at once if waits are reversed.

    Everything is launched and waited for before anything is verified: a rank whose result is wrong
    stays in step with the others.
    """
    group = _group_of(case, MEMORY[memory][0])
    if dist.get_rank() not in case.members:
        return
    rank = case.members.index(dist.get_rank())
    roots = range(len(case.members)) if case.form in ROOTED else (0,)
    salts = range(NUM_IN_FLIGHT) if case.mode == "async_reverse" else (0,)
    # Only pycoll promises the order of additions, and of its algorithms ring does not.
    exact = BACKEND != "pycoll" or case.algorithm == "ring"
    with _in_memory(memory, rank):
        trials = [
            build_trial(case, rank, root=root, salt=salt, exact=exact)
            for root in roots
            for salt in salts
        ]
    is_async = case.mode != "sync"
    works = [_LAUNCHERS[case.form](trial, group, is_async) for trial in trials]
    for work in reversed(works) if case.mode == "async_reverse" else works:
        for part in work or ():
            part.wait()
    for trial in trials:
        verify(trial)


# Groups of this rank by members and algorithm. Every rank runs the same cases in the same order, so
# all of them come to create a group at the same time.
_groups: dict[tuple[tuple[int, ...], str, str], Any] = {}


def _group_of(case: Case, memory_path: str) -> Any:
    """A process group, or None for the default one."""
    whole_world = len(case.members) == case.world_size
    if whole_world and case.algorithm == "auto" and memory_path == "auto":
        return None
    key = (case.members, case.algorithm, memory_path)
    if key not in _groups:
        os.environ["PYCOLL_MEMORY_PATH"] = memory_path
        try:
            options = group_options(case.algorithm)
            _groups[key] = dist.new_group(list(case.members), pg_options=options)
        finally:
            del os.environ["PYCOLL_MEMORY_PATH"]
    return _groups[key]


@contextlib.contextmanager
def _in_memory(memory: str, rank: int) -> Iterator[None]:
    """Within it, tensors are made where `memory` says for this rank."""
    if not MEMORY[memory][1]:
        yield
        return
    from pycoll.symmetric import shared_allocator

    with shared_allocator(rank % 2 in MEMORY[memory][1]):
        yield


def group_options(algorithm: str) -> Any:
    if BACKEND != "pycoll":
        return None
    from pycoll.options import Options  # not needed, and perhaps not built, for other backends

    return Options(algorithm=algorithm)


Works = Sequence[Any] | None
Launcher = Callable[[Trial, Any, bool], Works]


def _op_of(trial: Trial) -> Any:
    return reduce_op(trial.case.op, trial.factor)


def _all_reduce(trial: Trial, group: Any, is_async: bool) -> Works:
    op, (tensor,) = _op_of(trial), trial.outputs
    if trial.case.op == "product" and tensor.is_complex():
        # dist.all_reduce refuses complex products before the backend is asked.
        return _all_reduce_beneath(trial, group)
    return _listed(dist.all_reduce(tensor, op, group=group, async_op=is_async))


def _all_reduce_beneath(trial: Trial, group: Any) -> Works:
    options = dist.AllreduceOptions()
    options.reduceOp = _op_of(trial)
    group = group or dist.group.WORLD
    return [group.allreduce([tensor], options) for tensor in trial.outputs]


def _all_reduce_coalesced(trial: Trial, group: Any, is_async: bool) -> Works:
    if trial.case.op == "product" and trial.outputs[0].is_complex():
        return _all_reduce_beneath(trial, group)
    op = _op_of(trial)
    if is_async:
        with _coalescing(group) as works:
            for tensor in trial.outputs:
                dist.all_reduce(tensor, op, group=group)
        return works
    with _quiet():
        dist.all_reduce_coalesced(trial.outputs, op, group=group)
    return None


def _reduce(trial: Trial, group: Any, is_async: bool) -> Works:
    (tensor,) = trial.outputs or trial.inputs
    work = dist.reduce(
        tensor, group_dst=trial.root, op=_op_of(trial), group=group, async_op=is_async
    )
    return _listed(work)


def _reduce_scatter(trial: Trial, group: Any, is_async: bool) -> Works:
    op, (output,) = _op_of(trial), trial.outputs
    return _listed(dist.reduce_scatter(output, trial.inputs, op, group=group, async_op=is_async))


def _reduce_scatter_tensor(trial: Trial, group: Any, is_async: bool) -> Works:
    op, (output,), (tensor,) = _op_of(trial), trial.outputs, trial.inputs
    return _listed(reduce_scatter_tensor(output, tensor, op, group=group, async_op=is_async))


def _reduce_scatter_tensor_coalesced(trial: Trial, group: Any, is_async: bool) -> Works:
    op = _op_of(trial)
    if is_async:
        with _coalescing(group) as works:
            for output, tensor in zip(trial.outputs, trial.inputs, strict=True):
                reduce_scatter_tensor(output, tensor, op, group=group)
        return works
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    group = group or dist.group.WORLD
    group.reduce_scatter_tensor_coalesced(trial.outputs, trial.inputs, options).wait()
    return None


def _all_gather(trial: Trial, group: Any, is_async: bool) -> Works:
    (tensor,) = trial.inputs
    return _listed(dist.all_gather(trial.outputs, tensor, group=group, async_op=is_async))


def _all_gather_coalesced(trial: Trial, group: Any, is_async: bool) -> Works:
    width = len(trial.inputs)
    rows = [trial.outputs[i : i + width] for i in range(0, len(trial.outputs), width)]
    with _quiet():
        work = dist.all_gather_coalesced(rows, trial.inputs, group=group, async_op=is_async)
    return _listed(work)


def _all_gather_into_tensor(trial: Trial, group: Any, is_async: bool) -> Works:
    (output,), (tensor,) = trial.outputs, trial.inputs
    return _listed(all_gather_into_tensor(output, tensor, group=group, async_op=is_async))


def _all_gather_into_tensor_coalesced(trial: Trial, group: Any, is_async: bool) -> Works:
    if is_async:
        with _coalescing(group) as works:
            for output, tensor in zip(trial.outputs, trial.inputs, strict=True):
                all_gather_into_tensor(output, tensor, group=group)
        return works
    group = group or dist.group.WORLD
    group.allgather_into_tensor_coalesced(trial.outputs, trial.inputs).wait()
    return None


def _broadcast(trial: Trial, group: Any, is_async: bool) -> Works:
    (tensor,) = trial.outputs
    work = dist.broadcast(tensor, group_src=trial.root, group=group, async_op=is_async)
    return _listed(work)


def _gather(trial: Trial, group: Any, is_async: bool) -> Works:
    (tensor,), gathered = trial.inputs, trial.outputs or None
    work = dist.gather(tensor, gathered, group_dst=trial.root, group=group, async_op=is_async)
    return _listed(work)


def _scatter(trial: Trial, group: Any, is_async: bool) -> Works:
    (tensor,), sent = trial.outputs, trial.inputs or None
    work = dist.scatter(tensor, sent, group_src=trial.root, group=group, async_op=is_async)
    return _listed(work)


def _all_to_all(trial: Trial, group: Any, is_async: bool) -> Works:
    return _listed(dist.all_to_all(trial.outputs, trial.inputs, group=group, async_op=is_async))


def _all_to_all_single(trial: Trial, group: Any, is_async: bool) -> Works:
    (output,), (tensor,) = trial.outputs, trial.inputs
    splits = (trial.output_splits, trial.input_splits)
    return _listed(dist.all_to_all_single(output, tensor, *splits, group=group, async_op=is_async))


def _send_recv(trial: Trial, group: Any, is_async: bool) -> Works:
    """Every rank sends to the next one."""
    (received,), (sent,) = trial.outputs, trial.inputs
    after = (trial.rank + 1) % trial.world_size
    before = (trial.rank - 1) % trial.world_size
    if is_async:
        receiving = dist.irecv(received, group_src=before, group=group)
        return [dist.isend(sent, group_dst=after, group=group), receiving]
    if trial.rank == 0:
        dist.send(sent, group_dst=after, group=group)
        dist.recv(received, group_src=before, group=group)
    else:
        dist.recv(received, group_src=before, group=group)
        dist.send(sent, group_dst=after, group=group)
    return None


def _listed(work: Any) -> Works:
    return None if work is None else [work]


@contextlib.contextmanager
def _coalescing(group: Any) -> Iterator[list[Any]]:
    """Yields a list that holds the one work of everything called within, once it is left."""
    works: list[Any] = []
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        yield works
    works.append(manager)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """For functions that torch has deprecated and pycoll serves all the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_LAUNCHERS: dict[str, Launcher] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_uneven": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_tensor_in_place": _reduce_scatter_tensor,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_tensor_coalesced,
    "all_gather": _all_gather,
    "all_gather_uneven": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_into_tensor_in_place": _all_gather_into_tensor,
    "all_gather_into_tensor_coalesced": _all_gather_into_tensor_coalesced,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_uneven": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single_uneven": _all_to_all_single,
    "send_recv": _send_recv,
}
