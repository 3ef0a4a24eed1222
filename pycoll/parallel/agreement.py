"""What ranks tell each other beside gradients: short texts, flags, digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pycoll import collectives

Group = dist.ProcessGroup


def all_gather_bytes(mine: bytes, group: Group) -> list[bytes]:
    """What every rank of the group has given, in rank order; lengths may differ. Collective."""
    world_size = dist.get_world_size(group)
    lengths = torch.zeros(world_size, dtype=torch.int64)
    collectives.all_gather_into_tensor(lengths, torch.tensor([len(mine)]), group)
    parts = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
    collectives.all_gather(parts, _as_tensor(mine), group)
    return [bytes(part.numpy()) for part in parts]


def raise_on_all(problem: str, groups: Sequence[Group]) -> None:
    """Collective over each group in turn, which together reach all ranks.

    Raises:
        ValueError: on every rank, if any has given a text; the text of the first one.
    """
    for group in groups:
        problem = next(
            filter(None, (t.decode() for t in all_gather_bytes(problem.encode(), group))), ""
        )
    if problem:
        raise ValueError(problem)


def all_gather_rows(mine: bytes | bytearray, group: Group) -> Tensor:
    """Equally many bytes of every rank as (world_size, len(mine)) uint8. Collective."""
    rows = torch.empty((dist.get_world_size(group), len(mine)), dtype=torch.uint8)
    collectives.all_gather_into_tensor(rows.view(-1), _as_tensor(bytes(mine)), group)
    return rows


def _as_tensor(content: bytes) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def listed(names: Any, shown: int = 5) -> str:
    """ "'a', 'b' and 3 more": names for a message."""
    names = list(names)
    rest = len(names) - shown
    text = ", ".join(repr(name) for name in names[:shown])
    return f"{text} and {rest} more" if rest > 0 else text


def ranks_text(ranks: Any) -> str:
    """ "rank 1" or "ranks 0, 2"."""
    ranks = list(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
