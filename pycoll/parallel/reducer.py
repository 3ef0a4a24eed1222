"""The backward pass of DistributedDataParallel: gradients into buckets, buckets through the group, means back.

What holds between passes. The gradient of a parameter is a part that is equal on all ranks plus what this rank has
added to it since. A pass that synchronises replaces it by its mean over ranks: the equal part stays, the rest becomes
the mean of what the ranks have added. So it does not matter how many forward and backward passes lie between
two synchronisations, and a pass may touch any part of the model: a reduction is always of whole gradients.

One pass:

1. The backward pass reaches an output of the wrapped model (or a parameter, where the loss does not come from an
   output). The pass begins, and asks autograd to be called when it is over. It belongs to autograd's graph task,
   whatever nested tasks (reentrant checkpoints) run inside.
2. Hooks count gradients. When a bucket is complete and all before it have been issued, it is filled and its reduction
   is issued. Buckets are issued in the same order on all ranks, whatever the order of gradients.
3. At its end the rest is issued: parameters without a gradient contribute zeros. Ranks exchange four flags; where all
   are zero, which is the rule, every rank knows that the others have seen what it has seen. Otherwise they settle it:
   see `_settle`.
4. Reductions are waited for in their order, and gradients take their values.

The first pass that synchronises also records in which order gradients came. That of rank 0 is broadcast and makes
the buckets of all later passes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycoll import collectives
from pycoll.backend import backend_of, extension
from pycoll.bucket import (
    Bucket,
    BucketRecord,
    assign_buckets,
    make_buckets,
)
from pycoll.parallel.agreement import Group, all_gather_bytes, all_gather_rows, listed, ranks_text
from pycoll.parallel.gradients import copy_out, fill, not_finite
from pycoll.parallel.mixed_precision import ParameterCasts
from pycoll.parallel.passes import Event, Pass, PassRecord, Token
from pycoll.parallel.reduction import Reduction, Settings, issue_reduction

# More than a parameter can get in one pass; marks "not known yet".
_MANY = 1 << 40
_PASSES_KEPT = 16
# Of a rank that takes no part in a pass, where others have 0 or 1 a parameter.
_ABSENT = 2

_FLAGS = ("missing", "again", "not finite", "changed")


class Reducer:
    """Buckets of one model on one rank.

    Args:
        named: names and trainable parameters, in the same order on all ranks.
        sparse: names of parameters whose gradients are sparse.
        group: of pycoll's backend.
        settings: equal on all ranks.
        synchronise_by_default: asked when a pass begins that has reached no output of the model.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        sparse: frozenset[str],
        group: Group,
        settings: Settings,
        synchronise_by_default: Callable[[], bool],
    ) -> None:
        self.group, self.settings = group, settings
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.backend = backend_of(group)
        self._core = extension()
        self._synchronise_by_default = synchronise_by_default
        self._specs = [settings.spec_of(name, p, name in sparse) for name, p in named]
        self._delayed = frozenset(i for i, n in enumerate(self.names) if n in settings.delayed)
        # Parameters without elements never hold anything up, nor do those that are sent as they are.
        self._never_missing = bytes(
            int(p.numel() == 0 or i in self._delayed) for i, p in enumerate(self.parameters)
        )
        self._absent = bytes([_ABSENT]) * len(named)
        self._counter: Any = None
        # Gradients that a parameter gets in a pass. Of a static graph the first pass tells.
        usual = _MANY if settings.static_graph else 1
        self._expected = [0 if i in self._delayed else usual for i in range(len(named))]
        self._counts_known = not settings.static_graph
        self._knows_order = False
        self._pass: Pass | None = None
        self._num_passes = 0
        self._nowhere: frozenset[int] = frozenset()  # of a static graph
        # Parameters without gradient in all passes since the last forward; None: no pass yet.
        self._unfinished: set[int] | None = None
        self._handles: list[Any] = []
        self.history: deque[PassRecord] = deque(maxlen=_PASSES_KEPT)
        self.hook: Callable[[Any, Any], Any] | None = None
        self.hook_state: Any = None
        # Told when a backward pass begins and when it is over.
        self.casts: ParameterCasts | None = None
        # Called with a bucket whose gradients are done, on the thread of the backward pass, in order.
        self.on_bucket: list[Callable[[Bucket], None]] = []
        # None: the mean over all ranks; else the sum divided by this (uneven inputs).
        self.divisor: int | None = None
        self.buckets: list[Bucket] = []
        self._set_buckets(list(reversed(range(len(named)))))

    def _set_buckets(self, order: Sequence[int]) -> None:
        assignment = assign_buckets(self._specs, self.settings.caps, order)
        self.buckets = make_buckets(assignment, self._specs, self.parameters)
        self._facts = [bucket.facts() for bucket in self.buckets]
        self._bucket_of = [self.buckets[0]] * len(self.parameters)
        for bucket in self.buckets:
            for index in bucket.members:
                self._bucket_of[index] = bucket
        self._plan()

    def _plan(self) -> None:
        if self._counter is not None:
            bucket_of = [bucket.index for bucket in self._bucket_of]
            views: list[Tensor | None] = [None] * len(self.parameters)
            for bucket in self.buckets:
                for index, view in zip(bucket.members, bucket.views, strict=not bucket.sparse):
                    views[index] = view
            as_views = self.settings.gradient_as_bucket_view
            self._counter.plan(self._expected, bucket_of, len(self.buckets), views, as_views)

    # --- hooks -------------------------------------------------------------------------------------

    def install_hooks(self) -> None:
        self.remove_hooks()
        # Weak: hooks on parameters must not keep a reducer alive that nobody has any more.
        this = weakref.ref(self)

        def attention(event: int, index: int) -> None:
            if (reducer := this()) is not None:
                reducer._attend(event, index)

        self._counter = self._core.GradientCounter(self.parameters, attention)
        self._counter.set_used(self._never_missing)
        self._plan()

    def remove_hooks(self) -> None:
        if self._counter is not None:
            self._counter.remove()

    def output_reached(self, synchronises: bool) -> None:
        """Called in a backward pass that has come to an output of a forward which was to synchronise or not."""
        current = self._pass
        if current is None or current.token is None or current.token() is None:
            self._begin(synchronises)
        elif synchronises and not current.synchronises:
            current.synchronises = True
            self._num_passes += 1
            current.number = self._num_passes
            self._counter.set_synchronises(True)

    def _begin(self, synchronises: bool) -> None:
        if self._pass is not None:
            self._abandon(self._pass)
        self._num_passes += synchronises
        current = Pass(self._num_passes, synchronises, monotonic_ns())
        number = self._counter.begin(synchronises, not self._knows_order)
        token = Token(partial(self._task_over, number))
        current.token = weakref.ref(token)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._end, current, token))
        self._prepare(current)

        if self.casts is not None:
            self.casts.begin_backward()

    def _task_over(self, number: int) -> None:
        """autograd's graph task is gone, whether it has succeeded or not."""
        if self._counter.end(number) and self.casts is not None:
            self.casts.end_backward()

    def _prepare(self, current: Pass) -> None:
        for bucket in self.buckets:
            bucket.record = BucketRecord()
        self._pass = current

    def _abandon(self, stale: Pass) -> None:
        """A backward pass ended with an error after it had begun here. What it has sent, its peers have to
        have sent too; the numbers of passes, which are compared, see to that."""
        self._pass = None
        for reduction in stale.reductions:
            reduction.wait()

    def _attend(self, event: int, index: int) -> None:
        """Called by the counter, in a backward pass."""
        if event == Event.BEGIN:
            self._begin(self._synchronise_by_default())
            return
        current, bucket = self._pass, self._bucket_of[index]
        assert current is not None
        if event == Event.AGAIN:
            self._fired_again(current, bucket, index)
        else:
            self._issue_ready(current)

    def _fired_again(self, current: Pass, bucket: Bucket, index: int) -> None:
        """A second gradient of a parameter in one pass: reentrant checkpoints add theirs one by one."""
        if self.settings.static_graph and index not in self._delayed:
            current.changed.add(index)
        if bucket.index >= current.num_issued:
            return
        if self.settings.gradient_as_bucket_view or self.on_bucket:
            raise RuntimeError(
                f"parameter {self.names[index]!r} got another gradient after {bucket.describe()} had been sent. "
                "It is used in several reentrant checkpoints, or inside and outside of one: pass "
                "static_graph=True or gradient_as_bucket_view=False, or checkpoint with use_reentrant=False"
            )
        current.again.add(bucket.index)

    # --- sending -----------------------------------------------------------------------------------

    def _issue_ready(self, current: Pass) -> None:
        while current.num_issued < len(self.buckets):
            bucket = self.buckets[current.num_issued]
            if self._counter.pending(bucket.index):
                return
            self._issue(current, bucket)

    def _issue(self, current: Pass, bucket: Bucket) -> None:
        self._fill(current, bucket)
        current.reductions.append(self._reduce(current, bucket))

    @torch.no_grad()
    def _reduce(self, current: Pass, bucket: Bucket) -> Reduction:
        self._let_hook_end(current)
        tag = f"DDP pass {current.number}, {bucket.describe()}"
        before = self._core.set_tag(tag)
        try:
            return issue_reduction(bucket, self)
        finally:
            self._core.set_tag(before)

    def _let_hook_end(self, current: Pass) -> None:
        """Before this thread calls another collective: one that may still call some has to end first."""
        if self.hook is not None and not self.hook_may_overlap and current.reductions:
            current.reductions[-1].wait()

    def _fill(self, current: Pass, bucket: Bucket) -> None:
        # The counter has copied the gradients that came in this pass; all of them, if nothing is unusual.
        is_first = bucket.index >= current.num_issued and current.token is not None
        if not is_first or self._counter.uncopied(bucket.index):
            copied = self._counter.copied() if is_first else None
            as_views = self.settings.gradient_as_bucket_view
            fill(bucket, self._used_by(current), copied, current.saved, as_views)
        if self.settings.check_nan:
            current.not_finite += not_finite(bucket)

    def _copy_out(self, current: Pass, bucket: Bucket, nowhere: frozenset[int]) -> None:
        if bucket.sparse:
            if bucket.members[0] not in nowhere:
                bucket.parameters[0].grad = current.reductions[bucket.index].result
            return
        copy_out(bucket, nowhere, current.saved, self.settings.gradient_as_bucket_view)

    @property
    def hook_may_overlap(self) -> bool:
        """Whether the next bucket's hook may be called before this one's has ended: the order in which hooks call
        collectives must not depend on timing, and only hooks that call a single one are sure not to."""
        module = getattr(self.hook, "__module__", "") or ""
        return module.endswith("ddp_comm_hooks.default_hooks") or bool(
            getattr(self.hook, "may_overlap", False)
        )

    # --- the end of a pass -------------------------------------------------------------------------

    def _end(self, current: Pass, token: Token) -> None:
        try:
            if current.synchronises and self._pass is current:
                self._synchronise(current)
        finally:
            if self._pass is current:
                self._pass = None

    def shadow(self) -> None:
        """Takes part in a pass of the other ranks with nothing to contribute, when this one is out of inputs.

        Gradients become the others' means: a sharded optimizer steps with them.
        """
        self._num_passes += 1
        current = Pass(self._num_passes, True, monotonic_ns())
        self._prepare(current)
        for p in self.parameters:
            p.grad = None
        try:
            self._synchronise(current)
        finally:
            self._pass = None

    def _used_by(self, current: Pass) -> bytes:
        """A byte a parameter: 1, 0 or _ABSENT."""
        return self._absent if current.token is None else self._counter.used()

    def _synchronise(self, current: Pass) -> None:
        absent = current.token is None
        for bucket in self.buckets[current.num_issued :]:
            self._issue(current, bucket)
        flags = self._local_flags(current, absent)
        self._let_hook_end(current)
        core_tag = self._core.set_tag(f"DDP pass {current.number}, flags")
        try:
            work = collectives.all_reduce(flags, "max", self.group, async_op=True)
        finally:
            self._core.set_tag(core_tag)
        early = bool(self.on_bucket) and not self.settings.find_unused_parameters
        for bucket, reduction in zip(self.buckets, current.reductions, strict=True):
            reduction.wait()
            if early:
                used = self._used_by(current)
                missing = {i for i in bucket.members if not used[i]}
                self._copy_out(current, bucket, frozenset(missing))
                self._bucket_done(bucket)
        assert work is not None
        work.wait()
        nowhere, error = self._nowhere, None
        if bool(flags.any()):
            nowhere, error = self._settle(current, dict(zip(_FLAGS, flags.tolist(), strict=True)))
        elif self._unfinished is not None:
            self._unfinished.clear()
        if not early:
            for bucket in self.buckets:
                self._copy_out(current, bucket, nowhere)
        self._keep_record(current)
        if not self._counts_known and not absent:
            left = enumerate(self._counter.left())
            self._expected = [0 if i in self._delayed else _MANY - many for i, many in left]
            self._counts_known = True
            self._plan()
        if not self._knows_order:
            self._learn_order([] if absent else self._counter.arrivals())
        self._counter.set_used(self._never_missing)
        if error is not None:
            raise RuntimeError(error)
        if not early:
            for bucket in self.buckets:
                self._bucket_done(bucket)

    def _bucket_done(self, bucket: Bucket) -> None:
        for callback in self.on_bucket:
            callback(bucket)

    def _local_flags(self, current: Pass, absent: bool) -> Tensor:
        learned = self.settings.static_graph and self._counts_known
        if learned and not absent:
            off = {i for i, left in enumerate(self._counter.left()) if left}
            current.changed.update(off - self._delayed)
        missing = not learned and 0 in self._used_by(current)
        flags = [missing, bool(current.again), bool(current.not_finite), bool(current.changed)]
        return torch.tensor(flags, dtype=torch.int32)

    def _settle(self, current: Pass, flags: dict[str, int]) -> tuple[frozenset[int], str | None]:
        """Something was not as usual on some rank; all ranks are here.

        Returns:
            the parameters that no rank has used, whose gradients stay as they are, and an error to raise, the same on
            all ranks, once gradients are in order.
        """
        if flags["not finite"]:
            return self._nowhere, self._name_ranks(
                current.not_finite, "the gradients of {names} are not finite on {rank}"
            )
        if flags["changed"]:
            names = [self.names[i] for i in sorted(current.changed)]
            return self._nowhere, self._name_ranks(
                names,
                "static_graph=True, but {names} did not get as many gradients on {rank} as in the first pass",
            )
        if flags["again"]:
            self._reduce_again(current)
        if not flags["missing"]:
            return self._nowhere, None
        return self._settle_missing(current)

    def _name_ranks(self, names: list[str], text: str) -> str:
        """Collective. The text for every rank that has names to tell."""
        parts = []
        for rank, told in enumerate(all_gather_bytes("\n".join(names).encode(), self.group)):
            if told:
                shown = listed(told.decode().split("\n"))
                parts.append(text.format(names=shown, rank=f"rank {rank}"))
        return "; ".join(parts)

    def _reduce_again(self, current: Pass) -> None:
        """Collective. Buckets that some rank sent before its gradients were complete."""
        mine = bytes(bucket.index in current.again for bucket in self.buckets)
        rows = all_gather_rows(mine, self.group)
        for index in rows.any(dim=0).nonzero().flatten().tolist():
            bucket = self.buckets[index]
            self._fill(current, bucket)
            current.reductions[index] = self._reduce(current, bucket)
            current.reductions[index].wait()

    def _settle_missing(self, current: Pass) -> tuple[frozenset[int], str | None]:
        rows = all_gather_rows(self._used_by(current), self.group)  # (ranks, parameters)
        used, unused = rows == 1, rows == 0
        nowhere = frozenset((~used.any(dim=0)).nonzero().flatten().tolist())
        if self.settings.static_graph:
            self._nowhere = nowhere
        if self.settings.find_unused_parameters or self.settings.static_graph:
            return nowhere, None
        one_sided = (used.any(dim=0) & unused.any(dim=0)).nonzero().flatten().tolist()
        if one_sided:
            first = one_sided[0]
            without = ranks_text(unused[:, first].nonzero().flatten().tolist())
            return nowhere, (
                f"parameter {self.names[first]!r} got no gradient on {without}, but one on "
                f"{ranks_text(used[:, first].nonzero().flatten().tolist())} "
                f"({len(one_sided)} such parameter(s)); pass find_unused_parameters=True if ranks may "
                "use different parts of the model"
            )
        self._unfinished = set(nowhere) & (self._unfinished or set(nowhere))
        return nowhere, None

    def before_forward(self) -> None:
        """Raises if the passes since the last forward have left parameters without gradient."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished:
            names = [self.names[i] for i in sorted(unfinished)]
            indices = ", ".join(map(str, sorted(unfinished)[:20]))
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new one: "
                f"{listed(names, 20)} (parameter indices {indices}) got no gradient on any rank. Pass "
                "find_unused_parameters=True if the loss need not depend on all parameters, or freeze "
                "those with requires_grad=False"
            )

    def _learn_order(self, arrivals: Sequence[int]) -> None:
        """Collective. Buckets in the order in which rank 0 got its gradients; those it did not get come last."""
        rest = reversed(range(len(self.parameters)))
        # A parameter is ready when its last gradient is there.
        last = dict.fromkeys(reversed(arrivals))
        order = torch.tensor(list(dict.fromkeys([*reversed(last), *rest])), dtype=torch.int64)
        collectives.broadcast(order, group=self.group, group_src=0)
        self._knows_order = True
        self._set_buckets(order.tolist())

    def _keep_record(self, current: Pass) -> None:
        records = [bucket.record for bucket in self.buckets]
        self.history.append(
            PassRecord(
                current.number,
                current.begun_ns,
                monotonic_ns(),
                self._facts,
                records,
                self._counter.ready_ns() if current.token is not None else [0] * len(self.names),
            )
        )
