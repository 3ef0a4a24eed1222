"""The whole state of a sharded model, on all ranks or on one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from pycoll import collectives
from pycoll.parallel.agreement import raise_on_all
from pycoll.parallel.fsdp.schedule import state_of
from pycoll.parallel.fsdp.sharding import Group, Sharding
from pycoll.tags import tag


def _shardings(model: nn.Module) -> list[Sharding]:
    found: dict[Sharding, None] = {}
    for module in model.modules():
        if (state := state_of(module)) is not None:
            found[state.unit.sharding] = None
    if not found:
        raise ValueError(
            f"this {type(model).__name__} has no sharded module; call fully_shard first"
        )
    return list(found)


def _meet(model: nn.Module, what: str, timeout: timedelta | None) -> list[Group]:
    """All ranks are here, or an error names those that are not."""
    groups: dict[Any, None] = {}
    for sharding in _shardings(model):
        groups.update(dict.fromkeys(sharding.groups()))
    for group in groups:
        try:
            collectives.monitored_barrier(group, timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"{what} is collective: all ranks have to call it ({error})"
            ) from error
    return list(groups)


@torch.no_grad()
def full_state_dict(
    model: nn.Module,
    *,
    rank0_only: bool = False,
    timeout: timedelta | None = None,
) -> dict[str, Any]:
    """The state dict of the model as if it were not sharded: whole tensors, on the CPU, under the same names.
    Collective.

    For parts there is ``model.state_dict()``, which is not collective.

    Args:
        rank0_only: only rank 0 of each group gets it; the others get an empty one, and hold one whole tensor at a time.
        timeout: how long to wait for the other ranks; None: the group's.

    Raises:
        ValueError: the model is not sharded.
        RuntimeError: ranks do not come; names them.
    """
    _meet(model, "full_state_dict", timeout)
    is_first = all(sharding.rank == 0 for sharding in _shardings(model))
    kept: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            with tag(f"full_state_dict: {name}"):
                whole = value.full_tensor()
            # One rank's part is the whole, and its memory is the parameter's.
            shares = whole.data_ptr() == value.to_local().data_ptr()
            value = whole.clone() if shares else whole
        elif isinstance(value, Tensor):
            value = value.detach().clone()
        if not rank0_only or is_first:
            kept[name] = value
    return kept


@torch.no_grad()
def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    from_rank0: bool = False,
    timeout: timedelta | None = None,
) -> None:
    """Loads whole tensors into a sharded model. Collective with `from_rank0`.

    Args:
        state_dict: as from a model that is not sharded; every rank's, or with `from_rank0` that of rank 0 of the
            group, the others' being ignored.
        timeout: how long to wait for the other ranks; None: the group's.

    Raises:
        ValueError: a name is missing or left over, a shape differs, what should be a whole tensor is something else, or
            the model is still on the meta device; with `from_rank0` on all ranks.
        RuntimeError: ranks do not come; names them.
    """
    own = model.state_dict()
    extra_names = [name for name in own if _is_extra(name)]
    tensors = {name: own[name] for name in own if not _is_extra(name)}
    if not from_rank0:
        if problem := _meta_problem(tensors) or _problem(own, state_dict):
            raise ValueError(problem)
        for name, value in tensors.items():
            _put(value, state_dict[name])
        _load_extra(model, {name: state_dict[name] for name in extra_names})
        return
    groups = _meet(model, "load_full_state_dict", timeout)
    shardings = _shardings(model)
    is_first = all(sharding.rank == 0 for sharding in shardings) and all(
        s.replicas is None or s.replicas.rank() == 0 for s in shardings
    )
    raise_on_all(_meta_problem(tensors) or (_problem(own, state_dict) if is_first else ""), groups)
    for name, value in tensors.items():
        whole = torch.empty(value.shape, dtype=value.dtype)
        if is_first:
            whole.copy_(state_dict[name])
        with tag(f"load_full_state_dict: {name}"):
            for group in groups:
                collectives.broadcast(whole, group=group, group_src=0)
        _put(value, whole)
    if extra_names:
        extra = [{name: state_dict[name] for name in extra_names} if is_first else None]
        for group in groups:
            torch.distributed.broadcast_object_list(extra, group=group, group_src=0)
        _load_extra(model, extra[0])


def _is_extra(name: str) -> bool:
    """Of ``Module.get_extra_state``: any object."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _load_extra(model: nn.Module, extra: Any) -> None:
    if extra:
        model.load_state_dict(extra, strict=False)


def _meta_problem(own: Mapping[str, Any]) -> str:
    for name, value in own.items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        if isinstance(local, Tensor) and local.is_meta:
            return f"{name!r} of the model is still on the meta device; call model.to_empty(device='cpu') first"
    return ""


def _problem(own: Mapping[str, Any], given: Any) -> str:
    """Why `given` cannot be loaded; empty if it can."""
    if not isinstance(given, Mapping):
        return f"state_dict is a {type(given).__name__}; pass a mapping of names to whole tensors"
    missing, unexpected = [n for n in own if n not in given], [n for n in given if n not in own]
    if missing or unexpected:
        return (
            f"the state dict lacks {missing[:5]} ({len(missing)} names) and has {unexpected[:5]} "
            f"({len(unexpected)} names) that the model has not"
        )
    for name, value in own.items():
        whole = given[name]
        if _is_extra(name):
            continue
        if not isinstance(whole, Tensor) or isinstance(whole, DTensor):
            return (
                f"{name!r} is a {type(whole).__name__} in the state dict; give a whole tensor of shape "
                f"{tuple(value.shape)} (parts go through model.load_state_dict)"
            )
        if value.shape != whole.shape:
            return f"{name!r} has shape {tuple(whole.shape)} in the state dict and {tuple(value.shape)} in the model"
    return ""


def _put(target: Any, whole: Any) -> None:
    """This rank's part of `whole` into a value of the model's state dict."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    local: Tensor = target._local_tensor
    begin = 0
    for dim, placement in enumerate(target.placements):
        if placement.is_shard():
            mesh = target.device_mesh
            chunk = -(-target.shape[0] // mesh.size(dim))
            begin = min(mesh.get_local_rank(dim) * chunk, target.shape[0])
    local.copy_(whole[begin : begin + local.shape[0]])
