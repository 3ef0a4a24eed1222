"""A unit: parameters that are gathered and reduced together, and their memory (docs/fsdp.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycoll import collectives
from pycoll.bucket import allocate_bucket
from pycoll.parallel.fsdp.parameter import (
    ShardedParameter,
    contiguous_strides,
    local_of,
    with_storage,
)
from pycoll.parallel.fsdp.policies import MixedPrecisionPolicy, WirePolicy
from pycoll.parallel.fsdp.sharding import Group, Sharding, consecutive
from pycoll.tags import tag

# From this size on a parameter goes by itself, between memories that ranks map; smaller ones together.
_LARGE_BYTES = 64 << 10


def by_size(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Indices of the large ones, and of the others."""
    large: list[int] = []
    small: list[int] = []
    for i, tensor in enumerate(tensors):
        is_large = tensor.numel() * tensor.element_size() >= _LARGE_BYTES
        (large if is_large else small).append(i)
    return large, small


@dataclass(eq=False)
class DtypeGroup:
    """Parameters of a unit that have one dtype, and their buffers.

    Attributes:
        dtype: of parts.
        whole_dtype: of whole parameters.
        reduce_dtype: of gradients on their way.
        local: the local buffer.
        buffer: the unit buffer; its storage is empty while the parameters are only parts.
        regions: where in it each whole parameter with its padding lies. Not views: what is written through them does
            not count as a change of the parameters.
    """

    parameters: list[ShardedParameter]
    dtype: torch.dtype
    whole_dtype: torch.dtype
    reduce_dtype: torch.dtype
    local: Tensor
    buffer: Tensor
    regions: list[Tensor] = field(default_factory=list)

    @property
    def part_numels(self) -> list[int]:
        return [p.part_numel for p in self.parameters]

    @property
    def whole_nbytes(self) -> int:
        """Of the unit buffer while it is there."""
        return self.local.numel() * self.parameters[0].sharding.size * self.whole_dtype.itemsize

    def allocate(self) -> None:
        self.buffer.untyped_storage().resize_(self.whole_nbytes)

    def release(self) -> None:
        self.buffer.untyped_storage().resize_(0)

    def parts(self) -> list[Tensor]:
        """What this rank gives to a gather."""
        source = self.local if self.dtype == self.whole_dtype else self.local.to(self.whole_dtype)
        return consecutive(source, self.part_numels)


def make_dtype_group(
    parameters: Sequence[ShardedParameter], policy: MixedPrecisionPolicy
) -> DtypeGroup:
    """Buffers for parameters of one dtype; their parts move into the local buffer."""
    first = parameters[0]
    dtype = local_of(first.sharded).dtype
    whole_dtype = (policy.param_dtype or dtype) if dtype.is_floating_point else dtype
    reduce_dtype = (policy.reduce_dtype or whole_dtype) if dtype.is_floating_point else dtype
    device = local_of(first.sharded).device
    local = allocate_bucket(sum(p.part_numel for p in parameters), dtype, device).zero_()
    buffer = allocate_bucket(0, whole_dtype, torch.device("cpu"))
    group = DtypeGroup(list(parameters), dtype, whole_dtype, reduce_dtype, local, buffer)
    begin, size = 0, first.sharding.size
    for p, padded in zip(parameters, consecutive(local, group.part_numels), strict=True):
        _move_part(p, p.as_part(with_storage(padded)))
        storage = buffer.untyped_storage()
        region = torch.empty(0, dtype=whole_dtype)
        whole = torch.empty(0, dtype=whole_dtype)
        if device.type != "meta":
            # Bounds are checked when tensors are made.
            storage.resize_(group.whole_nbytes)
            region.set_(storage, begin, (size * p.part_numel,), (1,))
            whole.set_(storage, begin, p.shape, contiguous_strides(p.shape))
            storage.resize_(0)
        group.regions.append(region)
        p.whole = nn.Parameter(whole, requires_grad=p.sharded.requires_grad)
        begin += size * p.part_numel
    return group


@torch.no_grad()
def _move_part(p: ShardedParameter, target: Tensor) -> None:
    """Makes `target` the memory of a part, with its values. The parameter stays the object that optimizers have."""
    if not target.is_meta:
        target.copy_(local_of(p.sharded))
    p.sharded._local_tensor = target  # type: ignore[attr-defined]


@dataclass(eq=False)
class Reduction:
    """Gradients of a unit on their way.

    Attributes:
        inputs: whole gradients, kept until the work is done.
    """

    works: list[Any]
    inputs: list[Tensor]
    outputs: list[tuple[DtypeGroup, Tensor, list[ShardedParameter]]]
    divisor: float | None


class Unit:
    """Parameters of one module, or of what is left of it when units inside have taken theirs.

    Args:
        name: in messages and tags; as in ``named_modules`` of the root, once that is known.
        kept_by: after forward, the group whose ranks keep a part of the whole parameters; None: nobody does.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[ShardedParameter],
        sharding: Sharding,
        policy: MixedPrecisionPolicy,
        wire: WirePolicy,
        kept_by: Group | None,
    ) -> None:
        self.name, self.sharding, self.policy, self.wire = name, sharding, policy, wire
        self.parameters = list(parameters)
        self.kept_by = kept_by
        self.divide_factor: float | None = None
        self.is_whole = False
        self._gathering: list[Any] | None = None
        self._kept: list[list[Tensor]] | None = None  # slices of regions, a dtype group each
        # Summed within the sharding group only.
        self._partial: list[tuple[Tensor, list[ShardedParameter]]] | None = None
        self.reducing: Reduction | None = None
        self.groups: list[DtypeGroup] = []
        self.build()

    # --- memory ------------------------------------------------------------------------------------

    def build(self) -> None:
        """Makes buffers for the parts as they are now."""
        by_dtype: dict[torch.dtype, list[ShardedParameter]] = {}
        for p in self.parameters:
            by_dtype.setdefault(local_of(p.sharded).dtype, []).append(p)
        # They outlive a forward in inference mode, and are to be trained after it.
        with torch.inference_mode(False):
            self.groups = [make_dtype_group(members, self.policy) for members in by_dtype.values()]

    def take_over(self) -> None:
        """Parts may have been replaced since: by ``to_empty``, by another dtype, by loading with ``assign``.

        Raises:
            RuntimeError: a parameter is something else now, or has no memory yet.
        """
        if self.is_whole or self._gathering is not None:
            return  # unsharded by hand: the module does not hold its parts now
        changed = any(group.local.is_meta for group in self.groups)
        for group in self.groups:
            begin = group.local.data_ptr()
            for p in group.parameters:
                held = p.held()
                if held is not p.sharded:
                    self._replace(p, held)
                    changed = True
                local = local_of(p.sharded)
                if local.is_meta:
                    raise RuntimeError(
                        f"parameter {p.name!r} of {self.name!r} is still on the meta device; call "
                        "to_empty(device='cpu') on the model and initialise it, or load a state dict with assign=True"
                    )
                changed |= local.dtype != group.dtype
                changed |= local.numel() > 0 and local.data_ptr() != begin
                begin += p.part_numel * local.element_size()
        if changed:
            self.build()

    def _replace(self, p: ShardedParameter, held: Any) -> None:
        placements = getattr(held, "placements", None)
        if not isinstance(held, nn.Parameter) or placements != self.sharding.placements:
            raise RuntimeError(
                f"parameter {p.name!r} of {self.name!r} has been replaced by a {type(held).__name__} with placements "
                f"{placements}; it has to be a Parameter of a DTensor with {self.sharding.placements}"
            )
        if held.shape != p.shape:
            raise RuntimeError(
                f"parameter {p.name!r} of {self.name!r} had shape {tuple(p.shape)} when it was sharded, and has "
                f"{tuple(held.shape)} now; shard the model after its shapes are final"
            )
        p.sharded = held
        p.hold(held)

    # --- gathering ---------------------------------------------------------------------------------

    @torch.no_grad()
    def unshard(self) -> None:
        """Issues the gather, unless that has happened. Collective."""
        if self.is_whole or self._gathering is not None:
            return
        for group in self.groups:
            group.allocate()
        with tag(f"FSDP {self.name}: gather"):
            if self._kept is not None:
                assert self.kept_by is not None
                self._gathering = self._gather(self._kept, self.kept_by)
            elif self.wire.gather is not None:
                self._gathering = self._gather_on_wire()
            else:
                parts = [group.parts() for group in self.groups]
                self._gathering = self._gather(parts, self.sharding.group)

    def _gather(self, parts: Sequence[Sequence[Tensor]], process_group: Group) -> list[Any]:
        outputs = [region for group in self.groups for region in group.regions]
        inputs = [part for of_group in parts for part in of_group]
        large, small = by_size(outputs)
        works = [
            collectives.all_gather_into_tensor(outputs[i], inputs[i], process_group, async_op=True)
            for i in large
        ]
        if small:
            chosen = [outputs[i] for i in small], [inputs[i] for i in small]
            gather = collectives.all_gather_into_tensor_coalesced
            works.append(gather(*chosen, process_group, async_op=True))
        return works

    def _gather_on_wire(self) -> list[Any]:
        works = []
        for group in self.groups:
            # What cannot be encoded travels as it is.
            encoded = self.wire.gather if group.whole_dtype.is_floating_point else None
            for region, part in zip(group.regions, group.parts(), strict=True):
                works.append(
                    collectives.all_gather_into_tensor(
                        region,
                        part,
                        self.sharding.group,
                        async_op=True,
                        wire_dtype=encoded,
                        block=self.wire.block,
                    )
                )
        return works

    def wait_for_unshard(self) -> None:
        """Until the module holds whole parameters.

        Raises:
            torch.distributed.DistBackendError: names this rank and the unit.
        """
        if self._gathering is None:
            return
        works, self._gathering = self._gathering, None
        try:
            for work in works:
                work.wait()
        except Exception as error:
            raise dist.DistBackendError(
                f"rank {dist.get_rank()} could not gather the parameters of {self.name!r}: {error}"
            ) from error
        for p in self.parameters:
            assert p.whole is not None
            if p.whole.requires_grad != p.sharded.requires_grad:
                p.whole.requires_grad_(p.sharded.requires_grad)
            p.hold(p.whole)
        self.is_whole = True
        self._kept = None

    @torch.no_grad()
    def reshard(self, after_forward: bool = False) -> None:
        """The module holds parts, and whole parameters have no memory.

        Args:
            after_forward: a backward pass is to follow: ranks of the smaller group keep a part each.
        """
        self.wait_for_unshard()
        if not self.is_whole:
            return
        if after_forward and self.kept_by is not None:
            rank, size = dist.get_rank(self.kept_by), dist.get_world_size(self.kept_by)
            self._kept = [
                [region.view(size, -1)[rank].clone() for region in group.regions]
                for group in self.groups
            ]
        else:
            self._kept = None
        for p in self.parameters:
            p.hold(p.sharded)
        for group in self.groups:
            group.release()
        self.is_whole = False

    # --- reducing ----------------------------------------------------------------------------------

    def has_gradients(self) -> bool:
        """Some whole parameter has a gradient that has not been taken."""
        return any(p.whole is not None and p.whole.grad is not None for p in self.parameters)

    def drop_gradients(self) -> None:
        """All that are not yet ``grad`` of a part."""
        self._partial = None
        for p in self.parameters:
            p.fresh = p.accumulated = None
            p.used = False
            if p.whole is not None:
                p.whole.grad = None

    @torch.no_grad()
    def accumulate(self) -> None:
        """Keeps whole gradients for a later pass."""
        for group in self.groups:
            for p in group.parameters:
                p.take_gradient(group.reduce_dtype)

    @torch.no_grad()
    def reduce(self) -> None:
        """Issues the reduction of gradients to parts. Collective: all parameters that need a gradient take part."""
        self.accumulate()
        works: list[Any] = []
        inputs: list[Tensor] = []
        outputs: list[tuple[DtypeGroup, Tensor, list[ShardedParameter]]] = []
        plain = self.sharding.replicas is None and self.divide_factor is None
        op = "avg" if plain else "sum"
        with tag(f"FSDP {self.name}: reduce"):
            for group in self.groups:
                members = [p for p in group.parameters if p.sharded.requires_grad]
                if not members:
                    continue
                mine = [p.padded_gradient(group.reduce_dtype) for p in members]
                numels = [p.part_numel for p in members]
                output = allocate_bucket(sum(numels), group.reduce_dtype, group.local.device)
                works += self._reduce_scatter(consecutive(output, numels), mine, op)
                inputs += mine
                outputs.append((group, output, members))
        total = self.sharding.size * self.sharding.num_replicas
        divisor = None if plain else float(self.divide_factor or total)
        self.reducing = Reduction(works, inputs, outputs, divisor)

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: str
    ) -> list[Any]:
        group = self.sharding.group
        wire = self.wire.reduce if inputs[0].is_floating_point() else None
        everything = list(range(len(inputs)))
        large, small = by_size(inputs) if wire is None else (everything, [])
        works = [
            collectives.reduce_scatter_tensor(
                outputs[i],
                inputs[i],
                op,
                group,
                async_op=True,
                wire_dtype=wire,
                block=self.wire.block,
            )
            for i in large
        ]
        if small:
            chosen = [outputs[i] for i in small], [inputs[i] for i in small]
            scatter = collectives.reduce_scatter_tensor_coalesced
            works.append(scatter(*chosen, op, group, async_op=True))
        return works

    @torch.no_grad()
    def finish_reduce(self, over_replicas: bool) -> None:
        """Waits for the reduction; parameters have fresh gradients then.

        Args:
            over_replicas: on a two-dimensional mesh, sum over replicas too; else keep the sums for a later pass.

        Raises:
            torch.distributed.DistBackendError: names this rank and the unit.
        """
        reduction, self.reducing = self.reducing, None
        if reduction is None:
            return
        try:
            for work in reduction.works:
                work.wait()
            reduction.inputs.clear()
            sums = [(output, members) for _, output, members in reduction.outputs]
            if self.sharding.replicas is not None and not self._reduce_over_replicas(
                sums, over_replicas
            ):
                return
        except Exception as error:
            raise dist.DistBackendError(
                f"rank {dist.get_rank()} could not reduce the gradients of {self.name!r}: {error}"
            ) from error
        for group, output, members in reduction.outputs:
            if reduction.divisor is not None:
                output.div_(reduction.divisor)
            final = output.to(group.dtype)
            for p, padded in zip(
                members, consecutive(final, [p.part_numel for p in members]), strict=True
            ):
                part = p.as_part(padded)
                p.fresh = part if p.fresh is None else p.fresh.add_(part)

    def _reduce_over_replicas(
        self, sums: list[tuple[Tensor, list[ShardedParameter]]], now: bool
    ) -> bool:
        earlier, self._partial = self._partial, None
        if earlier is not None:
            before, after = ([p.name for _, ps in each for p in ps] for each in (earlier, sums))
            if before != after:
                raise ValueError(
                    f"passes with set_requires_all_reduce(False) reduced {before}, this one {after}; freeze and "
                    "unfreeze parameters only after a pass that reduces over replicas"
                )
            for (flat, _), (sum_before, _) in zip(sums, earlier, strict=True):
                flat.add_(sum_before)
        if not now:
            self._partial = sums
            return False
        with tag(f"FSDP {self.name}: reduce over replicas"):
            for flat, _ in sums:
                collectives.all_reduce(flat, "sum", self.sharding.replicas)
        return True
