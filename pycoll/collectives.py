"""Collectives, called directly: past the functions of torch.distributed, with the same meaning.

They accept what those refuse for reasons of other backends (products of complex numbers, lazily conjugated
tensors, monitored barriers), and cost less per call. As there, ``src`` and ``dst`` are ranks of the world, and
``group_src`` and ``group_dst`` in their place are ranks of the group. Every function runs to completion unless
``async_op`` is true; then it returns a ``torch.distributed.Work``.

``all_reduce``, ``all_gather`` and ``reduce_scatter`` take a `wire_dtype`: what elements of float32, bfloat16 or float16
are on their way between ranks, so that fewer bytes move. ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` and
``torch.int8`` travel with one float32 scale for each `block` elements (1 to 1024), ``torch.bfloat16`` and
``torch.float16`` without. All ranks get the same bits, sums are formed in float32 in rank order, and
docs/quantisation.md bounds the error. `wire_dtype` and `block` are the same on all ranks, or all of them raise.

Errors: ``ValueError`` for arguments (before anything moves; the other ranks raise too);
``torch.distributed.DistBackendError`` for ranks that disagree, time out, die or leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pycoll.backend import backend_of, extension

Group = dist.ProcessGroup | None
Op = dist.ReduceOp | dist.ReduceOp.RedOpType | str

# Numbers of operators by their names and by torch's values: what most calls pass, found without asking torch.
_NAMED_OPS: dict[Any, int] = {
    key: value.value
    for name, value in dist.ReduceOp.RedOpType.__members__.items()
    if name not in ("PREMUL_SUM", "UNUSED")
    for key in (name.lower(), value)
}


def _reduce_op(op: Op) -> Any:
    if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return op
    if not isinstance(op, str):
        raise TypeError(f"op is a {type(op).__name__} ({op!r}); pass a ReduceOp or its name")
    try:
        return getattr(dist.ReduceOp, op.upper())
    except AttributeError:
        raise ValueError(
            f"op {op!r} is none of sum, avg, product, min, max, band, bor, bxor "
            "(for premul_sum pass torch.distributed._make_nccl_premul_sum(factor))"
        ) from None


def _root(name: str, rank: int | None, group_rank: int | None, group: Group) -> int:
    """The rank of the group that is meant by ``src``/``dst`` or by ``group_src``/``group_dst``."""
    if (rank is None) == (group_rank is None):
        raise ValueError(f"pass either {name} (a rank of the world) or group_{name} (of the group)")
    chosen, label = (rank, name) if group_rank is None else (group_rank, f"group_{name}")
    if not isinstance(chosen, int):
        raise TypeError(f"{label} is a {type(chosen).__name__} ({chosen!r}); pass a rank, an int")
    if group_rank is not None or group is None:
        return chosen
    return dist.get_group_rank(group, chosen)


def _process_group(group: Group) -> Any:
    """For what torch has bound for groups and not for backends."""
    import torch.distributed as dist

    backend_of(group)
    return dist.group.WORLD if group is None else group


def _finish(work: Any, async_op: bool) -> dist.Work | None:
    if async_op:
        return cast("dist.Work", work)
    work.wait()
    return None


def _options(kind: str, async_op: bool, **fields: Any) -> Any:
    options = getattr(c10d, kind)()
    options.asyncOp = async_op
    for name, value in fields.items():
        setattr(options, name, value)
    return options


@dataclass(frozen=True)
class _Wire:
    """What elements are on their way, of one call."""

    dtype: torch.dtype
    block: int
    group: Group
    async_op: bool

    def run(
        self,
        collective: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        op: Op = "sum",
        lists: bool = False,
    ) -> dist.Work | None:
        work = backend_of(self.group).on_wire(
            collective,
            outputs=list(outputs),
            inputs=list(inputs),
            op=_reduce_op(op),
            lists=lists,
            wire_dtype=self.dtype,
            block=self.block,
            async_op=self.async_op,
        )
        return _finish(work, self.async_op)


def all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    wire_dtype: torch.dtype | None = None,
    block: int = 128,
) -> dist.Work | None:
    """Reduces `tensor` over all ranks, in place on every rank.

    Args:
        tensor: of any shape, strides and dtype in which `op` has a meaning; the same number of
            elements and dtype on all ranks.
        op: a ``torch.distributed.ReduceOp``, or its name in lower case.
        wire_dtype, block: see above. Contributions are encoded once, and the result once more.
    """
    if wire_dtype is not None:
        wire = _Wire(wire_dtype, block, group, async_op)
        return wire.run("all_reduce", [tensor], [tensor], op=op)
    if not async_op and _all_reduced_directly(tensor, op, group):
        return None
    options = _options("AllreduceOptions", async_op, reduceOp=_reduce_op(op))
    return _finish(backend_of(group).allreduce([tensor], options), async_op)


def _all_reduced_directly(tensor: torch.Tensor, op: Op, group: Group) -> bool:
    """Whether the compiled part has done it: without torch's options, lists and works, which cost more than the
    exchange of a small tensor. False, and nothing has happened, for arguments that need a closer look.
    """
    try:
        number = _NAMED_OPS[op]
    except (KeyError, TypeError):
        return False
    chosen = c10d._world.default_pg if group is None else group
    return extension().all_reduce(chosen, tensor, number)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    group_dst: int | None = None,
) -> dist.Work | None:
    """Reduces `tensor` over all ranks into that of rank `dst`; the others' stay as they are."""
    root = _root("dst", dst, group_dst, group)
    options = _options("ReduceOptions", async_op, reduceOp=_reduce_op(op), rootRank=root)
    return _finish(backend_of(group).reduce([tensor], options), async_op)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    group_src: int | None = None,
) -> dist.Work | None:
    """Copies the `tensor` of rank `src` into those of all ranks."""
    options = _options("BroadcastOptions", async_op, rootRank=_root("src", src, group_src, group))
    return _finish(backend_of(group).broadcast([tensor], options), async_op)


def all_gather(
    outputs: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    wire_dtype: torch.dtype | None = None,
    block: int = 128,
) -> dist.Work | None:
    """Copies the `tensor` of rank r into ``outputs[r]`` of all ranks; sizes may differ from rank to rank."""
    if wire_dtype is not None:
        wire = _Wire(wire_dtype, block, group, async_op)
        return wire.run("all_gather", outputs, [tensor], lists=True)
    options = _options("AllgatherOptions", async_op)
    return _finish(backend_of(group).allgather([list(outputs)], [tensor], options), async_op)


def all_gather_into_tensor(
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    wire_dtype: torch.dtype | None = None,
    block: int = 128,
) -> dist.Work | None:
    """Concatenates the tensors of all ranks, in rank order, in `output` (world_size times as many elements)."""
    if wire_dtype is not None:
        wire = _Wire(wire_dtype, block, group, async_op)
        return wire.run("all_gather", [output], [tensor])
    options = _options("AllgatherOptions", async_op)
    return _finish(backend_of(group)._allgather_base(output, tensor, options), async_op)


def all_gather_into_tensor_coalesced(
    outputs: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """`all_gather_into_tensor` of ``tensors[i]`` into ``outputs[i]`` for all i, as one operation a dtype."""
    options, pg = _options("AllgatherOptions", async_op), _process_group(group)
    work = pg.allgather_into_tensor_coalesced(list(outputs), list(tensors), options)
    return _finish(work, async_op)


def reduce_scatter(
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    wire_dtype: torch.dtype | None = None,
    block: int = 128,
) -> dist.Work | None:
    """Reduces ``inputs[r]`` over all ranks into the `output` of rank r; sizes may differ from rank to rank."""
    if wire_dtype is not None:
        wire = _Wire(wire_dtype, block, group, async_op)
        return wire.run("reduce_scatter", [output], inputs, op=op, lists=True)
    options = _options("ReduceScatterOptions", async_op, reduceOp=_reduce_op(op))
    return _finish(backend_of(group).reduce_scatter([output], [list(inputs)], options), async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    wire_dtype: torch.dtype | None = None,
    block: int = 128,
) -> dist.Work | None:
    """Reduces `tensor` (world_size times as many elements as `output`) over all ranks; rank r gets part r."""
    if wire_dtype is not None:
        wire = _Wire(wire_dtype, block, group, async_op)
        return wire.run("reduce_scatter", [output], [tensor], op=op)
    options = _options("ReduceScatterOptions", async_op, reduceOp=_reduce_op(op))
    return _finish(backend_of(group)._reduce_scatter_base(output, tensor, options), async_op)


def reduce_scatter_tensor_coalesced(
    outputs: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """`reduce_scatter_tensor` of ``tensors[i]`` into ``outputs[i]`` for all i, as one operation a dtype."""
    options = _options("ReduceScatterOptions", async_op, reduceOp=_reduce_op(op))
    pg = _process_group(group)
    work = pg.reduce_scatter_tensor_coalesced(list(outputs), list(tensors), options)
    return _finish(work, async_op)


def gather(
    outputs: Sequence[torch.Tensor] | None,
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    group_dst: int | None = None,
) -> dist.Work | None:
    """Copies the `tensor` of rank r into ``outputs[r]`` of rank `dst`; the others pass None."""
    options = _options("GatherOptions", async_op, rootRank=_root("dst", dst, group_dst, group))
    lists = [] if outputs is None else [list(outputs)]
    return _finish(backend_of(group).gather(lists, [tensor], options), async_op)


def scatter(
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor] | None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    group_src: int | None = None,
) -> dist.Work | None:
    """Copies ``inputs[r]`` of rank `src` into the `output` of rank r; the others pass None."""
    options = _options("ScatterOptions", async_op, rootRank=_root("src", src, group_src, group))
    lists = [] if inputs is None else [list(inputs)]
    return _finish(backend_of(group).scatter([output], lists, options), async_op)


def all_to_all(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Sends ``inputs[r]`` to rank r and puts what rank r sends into ``outputs[r]``."""
    options = _options("AllToAllOptions", async_op)
    return _finish(backend_of(group).alltoall(list(outputs), list(inputs), options), async_op)


def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Sends part r of `tensor` to rank r and puts what rank r sends into part r of `output`.

    Args:
        output_split_sizes: rows of the first dimension that come from each rank; None: equally many.
        input_split_sizes: rows that go to each rank; None: equally many.
    """
    options = _options("AllToAllOptions", async_op)
    splits = list(output_split_sizes or []), list(input_split_sizes or [])
    return _finish(backend_of(group).alltoall_base(output, tensor, *splits, options), async_op)


def barrier(group: Group = None, async_op: bool = False) -> dist.Work | None:
    """Returns when all ranks have called it."""
    return _finish(backend_of(group).barrier(_options("BarrierOptions", async_op)), async_op)


def monitored_barrier(
    group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that names the ranks that have not come, and may be repeated after that.

    Args:
        timeout: None: the group's.
        wait_all_ranks: name all missing ranks, not only the first.
    """
    pg: Any = dist.group.WORLD if group is None else group
    backend = backend_of(group)
    pg.monitored_barrier(backend.options._timeout if timeout is None else timeout, wait_all_ranks)
