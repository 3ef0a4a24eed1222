"""Whether ranks hold the same model: its structure when it is wrapped, its values whenever asked."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycoll.parallel.agreement import Group, all_gather_bytes, all_gather_rows, ranks_text

DIGEST_BYTES = 16


def describe_parameters(named: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """What has to be equal on all ranks, a parameter each, in their order."""
    return [
        {
            "name": name,
            "shape": list(p.shape),
            "dtype": str(p.dtype).removeprefix("torch."),
            "requires_grad": p.requires_grad,
            "device": p.device.type,
        }
        for name, p in named
    ]


def verify_equal_models(
    named: Sequence[tuple[str, Tensor]], settings: Mapping[str, Any], group: Group
) -> None:
    """Collective. Every rank raises the same error if parameters or settings differ between ranks.

    Args:
        named: names and parameters in their order.
        settings: what else has to be equal, by the name that a user knows it by; values that JSON can hold.

    Raises:
        RuntimeError: names a rank, the parameter or setting, and both values.
    """
    mine = json.dumps([describe_parameters(named), dict(settings)], sort_keys=True).encode()
    digests = all_gather_rows(hashlib.blake2b(mine, digest_size=DIGEST_BYTES).digest(), group)
    if bool((digests == digests[0]).all()):
        return
    everyone = [json.loads(text) for text in all_gather_bytes(mine, group)]
    raise RuntimeError(_difference(everyone))


def _difference(everyone: Sequence[Any]) -> str:
    """How the first rank that is not as most others are differs from the first of those."""
    texts = [json.dumps(each, sort_keys=True) for each in everyone]
    # Of equally frequent ones the first: then rank 0's is what the others are measured by.
    usual = Counter(texts).most_common(1)[0][0]
    reference = texts.index(usual)
    odd = next(rank for rank, text in enumerate(texts) if text != usual)
    head = "all ranks have to have the same model, but "
    (mine, my_settings), (theirs, their_settings) = everyone[odd], everyone[reference]
    for position, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            same_count = f", of {len(mine)} and {len(theirs)}" if len(mine) != len(theirs) else ""
            return (
                f"{head}parameter {position} is {_shown(a)} on rank {odd} and {_shown(b)} on rank "
                f"{reference}{same_count}"
            )
    if len(mine) != len(theirs):
        longer = mine if len(mine) > len(theirs) else theirs
        extra = _shown(longer[min(len(mine), len(theirs))])
        return (
            f"{head}rank {odd} has {len(mine)} parameters and rank {reference} has {len(theirs)}; "
            f"the first that only one of them has is {extra}"
        )
    for name in my_settings:
        if my_settings[name] != their_settings[name]:
            return (
                f"{head}{name} is {my_settings[name]} on rank {odd} and {their_settings[name]} on rank "
                f"{reference}"
            )
    return f"{head}rank {odd} differs from rank {reference}"


def _shown(parameter: Mapping[str, Any]) -> str:
    frozen = "" if parameter["requires_grad"] else ", requires_grad=False"
    shape = tuple(parameter["shape"])
    return f"{parameter['name']!r} {shape} {parameter['dtype']} on {parameter['device']}{frozen}"


@torch.no_grad()
def check_in_sync(module: nn.Module, group: Group, ignored: frozenset[str] = frozenset()) -> None:
    """Collective. Compares all parameters and buffers bit for bit, by digests of 16 bytes each.

    Raises:
        RuntimeError: on every rank; names the first tensor that differs and the ranks on which it does.
    """
    tensors = list(_named_state(module, ignored))
    names = json.dumps([name for name, _ in tensors]).encode()
    everyone = all_gather_bytes(names, group)
    if any(other != everyone[0] for other in everyone):
        odd = next(rank for rank, other in enumerate(everyone) if other != everyone[0])
        mine, theirs = json.loads(everyone[odd]), json.loads(everyone[0])
        extra = sorted(set(mine) ^ set(theirs))[:1] or ["the order of its tensors"]
        raise RuntimeError(
            f"the models of rank 0 and rank {odd} have other tensors: {extra[0]!r} differs"
        )
    digests = all_gather_rows(b"".join(digest(tensor) for _, tensor in tensors), group)
    rows = digests.view(dist.get_world_size(group), len(tensors), DIGEST_BYTES)
    differs = (rows != rows[0]).any(dim=2)  # (ranks, tensors)
    if not bool(differs.any()):
        return
    first = int(differs.any(dim=0).nonzero()[0])
    ranks = [rank for rank in range(len(rows)) if bool(differs[rank, first])]
    raise RuntimeError(
        f"the ranks are out of sync: {tensors[first][0]!r} of {ranks_text(ranks)} differs from rank 0's "
        f"({int(differs.any(dim=0).sum())} of {len(tensors)} parameters and buffers differ)"
    )


def _named_state(module: nn.Module, ignored: frozenset[str]) -> Iterable[tuple[str, Tensor]]:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name not in ignored:
            yield name, tensor


def digest(tensor: Tensor) -> bytes:
    """Of shape, dtype and every bit."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    hasher = hashlib.blake2b(
        f"{plain.dtype}{tuple(plain.shape)}".encode(), digest_size=DIGEST_BYTES
    )
    if plain.numel():
        content: Any = plain.reshape(-1).view(torch.uint8).numpy()
        hasher.update(content)
    return hasher.digest()
