"""One rank's buffers for a timed collective, the bound call, and the check of its result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pycoll.bench.cases import DTYPES, REDUCING, Case
from pycoll.bench.exact_data import ROOT, ExactData

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


class Buffers:
    """Tensors of one rank, the bound call, and the check of its result.

    Attributes:
        call: runs the collective once and returns when its result may be read.
        source, result: 1-d tensors of the case's dtype and device; without elements where this rank
            has no input or no result. In place they share memory.

    Args:
        case: what to run.
        rank: this rank.
        world_size: ranks in the group.
        api: where the collectives are looked up: torch.distributed, pycoll, `mpi_api.MpiApi`, or a
            stand-in under test. It may offer ``all_reduce_into(output, tensor, op=…)``, and ``zeros`` in
            place of ``torch.zeros``.

    Raises:
        ValueError: the case cannot be had with so many ranks.
    """

    def __init__(self, case: Case, rank: int, world_size: int, api: Any = dist) -> None:
        if case.op == "send_recv" and world_size < 2:
            raise ValueError("send_recv needs a next rank: world_size is 1, but must be 2 or more")
        self._case, self._rank, self._world_size = case, rank, world_size
        self._data = ExactData(case, rank, world_size)
        self.source, self.result = self._allocate(getattr(api, "zeros", torch.zeros))
        self._parameters: dict[str, Any] = {}
        if case.op in REDUCING:
            self._parameters["op"] = _TORCH_OPS[case.reduce_op]
        if case.async_op and case.op != "send_recv":
            self._parameters["async_op"] = True
        call = self._bind(api)
        self.call = _and_wait(call) if "async_op" in self._parameters else call

    def _allocate(self, make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        case, data = self._case, self._data
        zeros = partial(make, dtype=DTYPES[case.dtype], device=case.device)
        numel = max(data.in_numel, data.out_numel)
        if not case.in_place:
            return zeros(data.in_numel), zeros(data.out_numel)
        whole = zeros(numel)
        own = whole[self._rank * data.part : (self._rank + 1) * data.part]
        match case.op:
            case "all_gather":
                return own, whole
            case "gather":
                return (own, whole) if self._rank == ROOT else (whole, whole[:0])
            case "reduce_scatter":
                return whole, own
            case "scatter":
                return (whole, own) if self._rank == ROOT else (whole[:0], whole)
            case "reduce":
                return whole, whole[: data.out_numel]
            case _:
                return whole, whole

    def _parts(self, whole: Tensor) -> list[Tensor] | None:
        """Views of a rank's part each; None where this rank has no such buffer, as torch wants."""
        return list(whole.chunk(self._world_size)) if whole.numel() else None

    def _bind(self, api: Any) -> Callable[[], Any]:
        case, source, result, more = self._case, self.source, self.result, self._parameters
        match case.op:
            case "all_reduce":
                return self._bind_all_reduce(api)
            case "broadcast":
                call = partial(api.broadcast, result, ROOT, **more)
                return call if case.in_place or self._rank != ROOT else self._after_copy(call)
            case "reduce":
                if case.in_place or self._rank != ROOT:
                    return partial(api.reduce, source, ROOT, **more)
                return self._after_copy(partial(api.reduce, result, ROOT, **more))
            case "all_gather":
                return partial(api.all_gather_into_tensor, result, source, **more)
            case "reduce_scatter":
                return partial(api.reduce_scatter_tensor, result, source, **more)
            case "gather":
                return partial(api.gather, source, self._parts(result), dst=ROOT, **more)
            case "scatter":
                return partial(api.scatter, result, self._parts(source), src=ROOT, **more)
            case "all_to_all":
                return partial(api.all_to_all_single, result, source, **more)
            case "barrier":
                return partial(api.barrier, **more)
            case _:
                return self._bind_send_recv(api)

    def _bind_all_reduce(self, api: Any) -> Callable[[], Any]:
        if self._case.in_place:
            return partial(api.all_reduce, self.result, **self._parameters)
        if hasattr(api, "all_reduce_into"):
            return partial(api.all_reduce_into, self.result, self.source, **self._parameters)
        return self._after_copy(partial(api.all_reduce, self.result, **self._parameters))

    def _bind_send_recv(self, api: Any) -> Callable[[], Any]:
        after, before = (self._rank + 1) % self._world_size, (self._rank - 1) % self._world_size
        if hasattr(api, "send_recv"):
            return partial(api.send_recv, self.source, after, self.result, before)
        pair = [
            api.P2POp(api.isend, self.source, after),
            api.P2POp(api.irecv, self.result, before),
        ]

        def exchange() -> None:
            for work in api.batch_isend_irecv(pair):
                work.wait()

        return exchange

    def _after_copy(self, call: Callable[[], Any]) -> Callable[[], Any]:
        copy = partial(self.result.copy_, self.source)

        def copy_and_call() -> Any:
            copy()
            return call()

        return copy_and_call

    def load(self) -> None:
        """Writes this rank's input, and spoils every element of a separate output, so that stale
        results show.
        """
        if not self._case.in_place or self._data.out_numel > self._data.in_numel:
            self.result.copy_(self._data.expected() + 1)
        self.source.copy_(self._data.input())

    def clear(self) -> None:
        """Zeroes the buffers: sums of zeros neither overflow nor become denormal, however often
        they are repeated.
        """
        self.source.zero_()
        self.result.zero_()

    def finish(self) -> None:
        """Returns when the calls made so far have completed: on a GPU they only start."""
        if self._case.device == "cuda":
            torch.cuda.synchronize()

    def count_wrong(self) -> int:
        """Elements of the result that are not the expected ones, after one call on loaded data."""
        return int((self.result.cpu() != self._data.expected()).sum())


def _and_wait(start: Callable[[], Any]) -> Callable[[], None]:
    def start_and_wait() -> None:
        work = start()
        if work is not None:  # a rank that has no part in it
            work.wait()

    return start_and_wait
