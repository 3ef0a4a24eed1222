"""ZeroRedundancyOptimizer: every rank keeps the optimizer state of a part of the parameters (ZeRO, stage 1)."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from pycoll import collectives
from pycoll.parallel.agreement import all_gather_bytes
from pycoll.parallel.arguments import group_of
from pycoll.parallel.verification import verify_equal_models

# Of a parameter group: what is not a setting.
_MEMBERS = ("params", "param_names")
# Attributes that copies take over as they are.
_KEPT_IN_COPIES = (
    "rank",
    "world_size",
    "parameters_as_bucket_view",
    "optim",
    "_overlap_with_ddp",
    "_optimizer_class",
    "_optimizer_defaults",
    "_full_state",
    "_stepped_in_backward",
)


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _MEMBERS}


def partition(nbytes: list[int], world_size: int) -> list[int]:
    """The owner of each parameter: largest first, each to the rank that has the fewest bytes so far (of equals
    the lowest). Equal on all ranks, as it depends on sizes alone.
    """
    owners = [0] * len(nbytes)
    loads = [0] * world_size
    for index in sorted(range(len(nbytes)), key=lambda i: (-nbytes[i], i)):
        owner = min(range(world_size), key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += nbytes[index]
    return owners


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Wraps an optimizer so that its state is divided among the ranks of a group.

    A step updates this rank's parameters with the wrapped optimizer and then gathers everybody's. Gradients have to be
    equal on all ranks, as `pycoll.DistributedDataParallel` leaves them. Parameters are divided by bytes; a rank may
    have none.

    Args:
        params: as for any optimizer: parameters, dicts of parameter groups, or (name, parameter) pairs.
        optimizer_class: of the wrapped optimizer. Any that treats each parameter by itself.
        process_group: of pycoll's backend; None: the default group.
        parameters_as_bucket_view: parameters of a rank lie one after the other in memory, which saves copies when
            they are gathered.
        overlap_with_ddp: with `overlap(ddp)`, parameters are updated while later buckets of the backward pass are still
            being reduced; `step` then only gathers.
        defaults: for `optimizer_class`.

    Raises:
        RuntimeError: parameters differ between ranks.
        ValueError: `params` is empty or has something twice.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        group: Any = dist.group.WORLD if process_group is None else process_group
        self.process_group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._overlap_with_ddp = overlap_with_ddp
        self._optimizer_class, self._optimizer_defaults = optimizer_class, defaults
        self._owner: dict[nn.Parameter, int] = {}
        self._in_order: list[nn.Parameter] = []
        self._full_state: dict[str, Any] | None = None
        self._stepped_in_backward = False
        self._initialising = True
        Joinable.__init__(self)
        Optimizer.__init__(self, params, defaults)
        self._initialising = False
        named = [(str(i), p) for i, p in enumerate(self._parameters())]
        verify_equal_models(named, {"optimizer": optimizer_class.__name__}, group)
        self._divide()

    # --- who owns what -----------------------------------------------------------------------------

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _divide(self) -> None:
        """Gives every parameter that has none an owner, and this rank's to a wrapped optimizer.

        Owners of parameters that have one stay, since they hold its state.
        """
        parameters = self._parameters()
        if not self._owner:
            nbytes = [p.numel() * p.element_size() for p in parameters]
            owners = partition(nbytes, self.world_size)
            self._owner = dict(zip(parameters, owners, strict=True))
        else:
            loads = [0] * self.world_size
            for p, owner in self._owner.items():
                loads[owner] += p.numel() * p.element_size()
            for p in parameters:
                if p not in self._owner:
                    owner = min(range(self.world_size), key=lambda rank: (loads[rank], rank))
                    self._owner[p] = owner
                    loads[owner] += p.numel() * p.element_size()
        self._in_order = sorted(parameters, key=lambda p: self._owner[p])
        self._make_local_optimizer()
        self._flat: dict[tuple[torch.dtype, int], Tensor] = {}
        if self.parameters_as_bucket_view:
            self._move_into_buckets()

    def _make_local_optimizer(self) -> None:
        before = getattr(self, "optim", None)
        groups = [
            {**_settings_of(group), "params": self._mine(group["params"])}
            for group in self.param_groups
        ]
        # Optimizers refuse an empty list, but take an empty group.
        self.optim = self._optimizer_class(groups, **self._optimizer_defaults)
        if before is not None:
            self.optim.state.update(before.state)
        for group, local in zip(self.param_groups, self.optim.param_groups, strict=True):
            for key, value in _settings_of(local).items():
                group.setdefault(key, value)

    def _mine(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in parameters if self._owner[p] == self.rank]

    @torch.no_grad()
    def _move_into_buckets(self) -> None:
        for key, parameters in self._kinds().items():
            flat = torch.cat([p.detach().reshape(-1) for p in parameters])
            begin = 0
            for p in parameters:
                p.data = flat[begin : begin + p.numel()].view(p.shape)
                begin += p.numel()
            self._flat[key] = flat

    def _kinds(self) -> dict[tuple[torch.dtype, int], list[nn.Parameter]]:
        """Parameters by dtype and owner, the owners of a dtype together and in order."""
        kinds: dict[tuple[torch.dtype, int], list[nn.Parameter]] = {}
        for dtype in sorted({p.dtype for p in self._in_order}, key=str):
            for p in self._in_order:
                if p.dtype == dtype:
                    kinds.setdefault((dtype, self._owner[p]), []).append(p)
        return kinds

    # --- a step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Updates this rank's parameters and gathers all. Collective.

        Args:
            closure: as for the wrapped optimizer; called on every rank.

        Returns:
            what the closure returned, else None.
        """
        Join.notify_join_context(self)
        loss = None
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            if closure is not None:
                raise ValueError("a closure cannot be used with overlap_with_ddp=True")
        else:
            loss = self._local_step(closure, **kwargs)
        self._gather()
        return loss

    def _local_step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        self._copy_settings(self.param_groups, self.optim.param_groups)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        else:
            loss = None
        self.optim.step(**kwargs)
        self._copy_settings(self.optim.param_groups, self.param_groups)
        return loss

    @staticmethod
    def _copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        """Learning rates and the like: schedulers change them on the outside, some optimizers on the inside."""
        for one, other in zip(source, target, strict=True):
            other.update(_settings_of(one))

    @torch.no_grad()
    def _gather(self) -> None:
        """Every parameter from its owner to all ranks: one all_gather of uneven parts a dtype."""
        kinds = self._kinds()
        for dtype in dict.fromkeys(dtype for dtype, _ in kinds):
            parts, mine = [], self._empty(0, dtype)
            for rank in range(self.world_size):
                parameters = kinds.get((dtype, rank), [])
                parts.append(self._part(dtype, rank, parameters))
                if rank == self.rank:
                    mine = parts[-1]
                    if parameters and (dtype, rank) not in self._flat:
                        torch.cat([p.detach().reshape(-1) for p in parameters], out=mine)
            collectives.all_gather(parts, mine, self.process_group)
            for rank, part in enumerate(parts):
                if rank != self.rank and (dtype, rank) not in self._flat:
                    self._scatter_back(part, kinds.get((dtype, rank), []))

    def _part(self, dtype: torch.dtype, rank: int, parameters: list[nn.Parameter]) -> Tensor:
        flat = self._flat.get((dtype, rank))
        if flat is not None:
            return flat
        return self._empty(sum(p.numel() for p in parameters), dtype)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._in_order[0].device)

    @staticmethod
    def _scatter_back(part: Tensor, parameters: list[nn.Parameter]) -> None:
        begin = 0
        for p in parameters:
            p.copy_(part[begin : begin + p.numel()].view(p.shape))
            begin += p.numel()

    # --- overlap with the backward pass ------------------------------------------------------------

    def overlap(self, ddp: Any) -> None:
        """From now on the backward passes of `ddp` that synchronise update this rank's parameters, a bucket at a time.

        Call `step` after each of them, as usual; it gathers. Before a pass that only accumulates, use ``no_sync``.

        Args:
            ddp: a `pycoll.DistributedDataParallel` whose parameters these are.

        Raises:
            RuntimeError: this was made with overlap_with_ddp=False.
        """
        if not self._overlap_with_ddp:
            raise RuntimeError("pass overlap_with_ddp=True to ZeroRedundancyOptimizer")
        ddp.reducer.on_bucket.append(self._bucket_reduced)

    @torch.no_grad()
    def _bucket_reduced(self, bucket: Any) -> None:
        self._stepped_in_backward = True
        mine = {p for p in bucket.parameters if self._owner.get(p) == self.rank}
        if not mine:
            return
        # Optimizers pass over parameters without gradient: those of other buckets wait for their turn.
        hidden = [
            (p, p.grad)
            for group in self.optim.param_groups
            for p in group["params"]
            if p not in mine and p.grad is not None
        ]
        for p, _ in hidden:
            p.grad = None
        try:
            self._local_step()
        finally:
            for p, grad in hidden:
                p.grad = grad

    # --- parameter groups and state ----------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any optimizer, on all ranks alike; new parameters go to the ranks that have least."""
        Optimizer.add_param_group(self, param_group)
        if not self._initialising:
            self._divide()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all parameters, also those of other ranks."""
        Optimizer.zero_grad(self, set_to_none)

    def _index(self) -> dict[Tensor, int]:
        return {p: i for i, p in enumerate(self._parameters())}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collective. Gathers the state of all ranks on rank `to` of the group, for `state_dict` there."""
        index = self._index()
        local = {index[p]: self._on_cpu(state) for p, state in self.optim.state.items()}
        buffer = io.BytesIO()
        torch.save(local, buffer)
        everyone = all_gather_bytes(buffer.getvalue(), self.process_group)
        self._full_state = None
        if self.rank != to:
            return
        state: dict[int, Any] = {}
        for text in everyone:
            state.update(torch.load(io.BytesIO(text), weights_only=False))
        self._full_state = {key: state[key] for key in sorted(state)}  # type: ignore[misc]

    @staticmethod
    def _on_cpu(state: Any) -> Any:
        return {k: v.cpu() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """That of an unwrapped optimizer, as `consolidate_state_dict` has gathered it: it can be loaded by one, and by
        a wrapper on any number of ranks.

        Raises:
            RuntimeError: this rank is not the one that the state was gathered on, or it was not since the last load.
        """
        if self._full_state is None:
            raise RuntimeError(
                f"rank {self.rank} has only its own part of the state; call "
                f"consolidate_state_dict(to={self.rank}) on all ranks first"
            )
        index = self._index()
        groups = []
        for group in self.param_groups:
            kept = {key: value for key, value in group.items() if key != "params"}
            groups.append({**kept, "params": [index[p] for p in group["params"]]})
        return {"state": self._full_state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes this rank's part of a state dict that all ranks have. Not collective.

        Raises:
            ValueError: the state dict has other parameter groups.
        """
        # The wrapped optimizer's own loading casts and checks: give it the groups as it knows them.
        lengths = [len(group["params"]) for group in state_dict["param_groups"]]
        if lengths != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                f"the state dict has parameter groups of {lengths} parameters, but the optimizer has "
                f"{[len(group['params']) for group in self.param_groups]}"
            )
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        key_of = dict(zip(self._parameters(), saved, strict=True))
        groups, state, number = [], {}, 0
        for mine, theirs in zip(self.optim.param_groups, state_dict["param_groups"], strict=True):
            keys = []
            for p in mine["params"]:
                if key_of[p] in state_dict["state"]:
                    state[number] = state_dict["state"][key_of[p]]
                keys.append(number)
                number += 1
            groups.append({**_settings_of(theirs), "params": keys})
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        self._copy_settings(self.optim.param_groups, self.param_groups)
        self._full_state = None

    # --- copies ------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroRedundancyOptimizer:
        """An optimizer of its own on the same group, of copies of the parameters. Not collective."""
        memo[id(self.process_group)] = self.process_group
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        state = copy.deepcopy(self.__getstate__(), memo)
        duplicate.__setstate__({**state, "process_group": self.process_group})
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        owners = [self._owner[p] for p in self._parameters()]
        kept = {name: getattr(self, name) for name in _KEPT_IN_COPIES}
        return {**Optimizer.__getstate__(self), "owners": owners, "kept": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a pickle: on the default group, which has to exist. Not collective.

        Raises:
            RuntimeError: the pickle is of another rank, or of another number of ranks.
        """
        state = dict(state)
        group: Any = state.pop("process_group", None) or group_of(None, None)
        owners, kept = state.pop("owners"), state.pop("kept")
        place = dist.get_rank(group), dist.get_world_size(group)
        if place != (kept["rank"], kept["world_size"]):
            raise RuntimeError(
                f"this is a pickle of rank {kept['rank']} of {kept['world_size']}, with its part of the state, "
                f"but here is rank {place[0]} of {place[1]}; use consolidate_state_dict "
                "and state_dict to move optimizers between ranks"
            )
        Joinable.__init__(self)
        Optimizer.__setstate__(self, state)
        self.__dict__.update(kept)
        self.process_group = group
        self._initialising = False
        self._owner = dict(zip(self._parameters(), owners, strict=True))
        self._divide()

    # --- uneven inputs -----------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Steps along with the ranks that still have batches."""
        return _StepAlong(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.process_group


class _StepAlong(JoinHook):
    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """A rank without batches has gradients as the others have, from the wrapper that it joined before."""
        self._optimizer.step()
