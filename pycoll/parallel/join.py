"""Uneven inputs: what a rank without batches does while the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.algorithms.join import JoinHook

from pycoll import collectives
from pycoll.parallel.agreement import Group
from pycoll.parallel.state import broadcast_tensors

if TYPE_CHECKING:
    from pycoll.parallel.ddp import DistributedDataParallel


def any_rank_synchronises(mine: bool, group: Group) -> bool:
    """Collective, once a forward of the ranks that have batches."""
    flag = torch.tensor([int(mine)])
    collectives.all_reduce(flag, "max", group)
    return bool(flag.item())


def highest_rank_with(condition: bool, group: Group) -> int:
    """Collective. The highest rank of the group whose `condition` holds, or -1."""
    rank = torch.tensor([group.rank() if condition else -1])
    collectives.all_reduce(rank, "max", group)
    return int(rank.item())


class DDPJoinHook(JoinHook):
    """Runs the collectives of one forward and one backward pass a step, as a rank with nothing to add."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def main_hook(self) -> None:
        ddp = self._ddp
        synchronises = any_rank_synchronises(False, ddp.process_group)
        if ddp._syncs_buffers(synchronises):
            ddp._sync_buffers(absent=True)
        ddp.require_forward_param_sync = synchronises
        if synchronises:
            # Only whether there is one counts: the absent rank's result is thrown away.
            ddp.reducer.divisor = None if ddp._divide_by_initial_world_size else 1
            ddp.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks take the model of one of those that joined last."""
        ddp = self._ddp
        ddp.reducer.divisor = None
        src = highest_rank_with(is_last_joiner, ddp.process_group)
        broadcast_tensors([t for _, t in ddp._named_state()], src, ddp.process_group)
