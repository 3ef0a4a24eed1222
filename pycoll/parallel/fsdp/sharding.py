"""Among which ranks a unit is divided, and who has which rows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from pycoll.backend import backend_of

Group = dist.ProcessGroup


# Made so far, by the group that divides them.
_units: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Sharding:
    """The ranks of a unit.

    Attributes:
        mesh: (shard,) or (replicate, shard).
        group: among whose ranks every parameter is divided.
        replicas: of ranks with the same parts, on a two-dimensional mesh.
    """

    mesh: DeviceMesh
    group: Group
    replicas: Group | None

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Sharding:
        """
        Args:
            mesh: one-dimensional, or (replicate, shard); None: all ranks of the default group.

        Raises:
            TypeError, ValueError: `mesh` is none of those, or a group's backend is not pycoll.
        """
        if mesh is None:
            if not dist.is_initialized():
                raise ValueError("there is no default group; call init_process_group first")
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh is a {type(mesh).__name__}; pass a DeviceMesh or None")
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"mesh has {mesh.ndim} dims; pass one of (shard,) or (replicate, shard), for instance "
                "by slicing it with names of dims"
            )
        if mesh.device_type != "cpu":
            raise ValueError(
                f"mesh is of {mesh.device_type} devices; this build moves CPU tensors only"
            )
        group = mesh.get_group(mesh.ndim - 1)
        replicas = mesh.get_group(0) if mesh.ndim == 2 else None
        for each in (group, replicas):
            if each is not None:
                backend_of(each)
        return cls(mesh, group, replicas)

    @cached_property
    def rank(self) -> int:
        """Of this process in `group`."""
        return dist.get_rank(self.group)

    @cached_property
    def size(self) -> int:
        """Ranks that divide a parameter."""
        return dist.get_world_size(self.group)

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicas is None else dist.get_world_size(self.replicas)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Of parts, as DTensors."""
        return (Shard(0),) if self.replicas is None else (Replicate(), Shard(0))

    def next_number(self) -> int:
        """Counts units of the group, equally on all its ranks."""
        number = _units.get(self.group, 0)
        _units[self.group] = number + 1
        return number

    def groups(self) -> list[Group]:
        """Reducing over each in turn reduces over all ranks."""
        return [self.group] if self.replicas is None else [self.group, self.replicas]


# Smaller groups, by the ranks that they are part of and their size.
_smaller: dict[tuple[Any, ...], Group] = {}


def smaller_group(sharding: Sharding, size: int) -> Group:
    """Of this rank: `size` consecutive ranks of the sharding's group. Collective at first use.

    Raises:
        ValueError: `size` does not divide the number of ranks.
    """
    if size < 1 or sharding.size % size:
        raise ValueError(
            f"reshard_after_forward={size} does not divide the {sharding.size} ranks that a parameter is "
            "divided among; give a divisor, True or False"
        )
    ranks = dist.get_process_group_ranks(sharding.group)
    key = (sharding.group.group_name, *ranks, size)
    if key not in _smaller or _smaller[key] not in dist.distributed_c10d._world.pg_map:
        begin = sharding.rank // size * size
        mine = ranks[begin : begin + size]
        group = dist.new_group(mine, backend="pycoll", use_local_synchronization=True)
        _smaller[key] = group
    return _smaller[key]


def chunk_rows(rows: int, size: int) -> int:
    """Rows of every part but the last ones."""
    return -(-rows // size)


def rows_of(rows: int, size: int, rank: int) -> tuple[int, int]:
    """First and last row (not included) of the part of `rank`."""
    chunk = chunk_rows(rows, size)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def consecutive(flat: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Parts of `flat`, (sum of lengths,), one after the other."""
    return list(flat.split_with_sizes(list(lengths)))
