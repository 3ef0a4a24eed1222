"""One bucket through the group: by all_reduce, or by a communication hook."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pycoll import collectives
from pycoll.bucket import Bucket, GradBucket, ParameterSpec

if TYPE_CHECKING:
    from pycoll.parallel.reducer import Reducer


@dataclass(frozen=True)
class Settings:
    """How gradients are reduced; equal on all ranks.

    Attributes:
        caps: of buckets, in bytes; see `pycoll.bucket.assign_buckets`.
        find_unused_parameters: parameters may be left without gradient, by ranks at will.
        static_graph: every pass uses parameters as often as the first one.
        gradient_as_bucket_view: gradients lie in the buckets.
        check_nan: look for infinities and NaN before anything is reduced.
        reduce_dtype: of floating-point gradients in buckets; None: their own.
        delayed: names of parameters whose gradients go with that of `delayed_until`, as they are at that time.
    """

    caps: tuple[int, ...]
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    check_nan: bool = False
    reduce_dtype: torch.dtype | None = None
    delayed: tuple[str, ...] = ()
    delayed_until: str | None = None

    def spec_of(self, name: str, parameter: Tensor, sparse: bool) -> ParameterSpec:
        """What buckets need to know of a parameter."""
        casts = parameter.is_floating_point() and not sparse
        dtype = self.reduce_dtype if casts else None
        leader = self.delayed_until if name in self.delayed else None
        return ParameterSpec.of(name, parameter, sparse, dtype, leader)


@dataclass(eq=False)
class Reduction:
    """A reduction that has been issued.

    Attributes:
        pending: a Work or a Future; None once it has been waited for.
        divisor: what the sum is still to be divided by.
        result: of a sparse bucket.
    """

    bucket: Bucket
    rank: int
    pending: Any = None
    divisor: int | None = None
    result: Tensor | None = None
    keeps_layout: torch.layout = field(default=torch.strided)

    def wait(self) -> None:
        """Until the bucket holds its means.

        Raises:
            torch.distributed.DistBackendError: names this rank, the bucket and its parameters.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return
        before = monotonic_ns()
        try:
            value = pending.wait()
        except Exception as error:
            raise dist.DistBackendError(
                f"rank {self.rank} could not reduce the gradients of {self.bucket.describe()}: {error}"
            ) from error
        record = self.bucket.record
        record.end_ns = monotonic_ns()
        record.exposed_ns += record.end_ns - before
        with torch.no_grad():
            if isinstance(pending, torch._C.Future):
                self._take(value)
            self._divide()

    def _take(self, value: Any) -> None:
        """The result of a hook: a tensor, or a list of one, of as many elements as the bucket has."""
        tensor = value[0] if isinstance(value, (list, tuple)) else value
        buffer = self.bucket.buffer
        target = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        if not isinstance(tensor, Tensor) or tensor.numel() != target.numel():
            what = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RuntimeError(
                f"the communication hook gave {what} for {self.bucket.describe()}, which has "
                f"{target.numel()} elements"
            )
        if tensor.data_ptr() != target.data_ptr() or tensor.dtype != target.dtype:
            target.copy_(tensor.view(-1))

    def _divide(self) -> None:
        if self.result is not None:
            if self.divisor is not None:
                self.result = self.result / self.divisor
            if self.keeps_layout is torch.strided:
                self.result = self.result.to_dense()
            else:
                self.result = self.result.coalesce()
        elif self.divisor is not None:
            self.bucket.buffer.div_(self.divisor)


def issue_reduction(bucket: Bucket, reducer: Reducer) -> Reduction:
    """Starts to reduce a bucket that has been filled."""
    reduction = Reduction(bucket, reducer.rank)
    record = bucket.record
    record.start_ns = monotonic_ns()
    if bucket.sparse:
        _issue_sparse(reduction, reducer)
    elif bucket.buffer.numel() == 0:
        pass  # parameters without elements only: known to all ranks
    elif reducer.hook is not None:
        shown = GradBucket(bucket, len(reducer.buckets))
        reduction.pending = reducer.hook(reducer.hook_state, shown)
        if not isinstance(reduction.pending, torch._C.Future):
            raise TypeError(
                "the communication hook returned a "
                f"{type(reduction.pending).__name__}; it has to return a torch.futures.Future"
            )
    else:
        reduction.divisor = reducer.divisor
        op = "avg" if reducer.divisor is None else "sum"
        reduction.pending = collectives.all_reduce(bucket.buffer, op, reducer.group, async_op=True)
        record.sequence = reducer.backend._get_sequence_number_for_group()
    record.issued_ns = monotonic_ns()
    record.exposed_ns += record.issued_ns - record.start_ns
    return reduction


def _issue_sparse(reduction: Reduction, reducer: Reducer) -> None:
    """Entries of all ranks are put together; ranks may have different numbers of them, or none."""
    parameter = reduction.bucket.parameters[0]
    grad = parameter.grad
    if grad is None:
        indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_empty((0, *parameter.shape[1:]))
        mine = torch.sparse_coo_tensor(indices, values, parameter.shape)
        reduction.keeps_layout = torch.sparse_coo
    elif grad.is_sparse:
        mine, reduction.keeps_layout = grad.detach().coalesce().clone(), torch.sparse_coo
    else:
        mine = grad.detach().to_sparse(1)
    reduction.result = mine
    reduction.divisor = reducer.divisor
    op = "avg" if reducer.divisor is None else "sum"
    reduction.pending = collectives.all_reduce(mine, op, reducer.group, async_op=True)
