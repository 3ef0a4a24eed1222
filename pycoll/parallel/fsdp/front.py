"""FullyShardedDataParallel: `fully_shard` for programs that wrap a model in one call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch

from pycoll.parallel.fsdp.clipping import clip_grad_norm_
from pycoll.parallel.fsdp.module import FSDPModule, fully_shard
from pycoll.parallel.fsdp.policies import WirePolicy, as_mixed_precision, check_offload
from pycoll.parallel.fsdp.schedule import state_of


class ShardingStrategy(Enum):
    """Names and meanings as torch's."""

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


_HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


class FullyShardedDataParallel(nn.Module):
    """Shards a model: the modules that a policy picks, and what is left. `module` is the model, sharded in place.

    Arguments are in the order of torch's class, and its policies and enumerations will do.

    Args:
        module: see `fully_shard`.
        process_group: of pycoll's backend; None: the default group. For hybrid sharding give `device_mesh`.
        sharding_strategy: a `ShardingStrategy`, torch's, or the name of one; None: FULL_SHARD.
        cpu_offload: see `OffloadPolicy`.
        auto_wrap_policy: ``policy(module=m, recurse=False, nonwrapped_numel=n)`` says whether `m` becomes a unit, as
            torch's policies do (``ModuleWrapPolicy``, ``size_based_auto_wrap_policy``); or the set of classes that do.
        backward_prefetch: None: a unit is gathered when its backward begins; any other: while the one before computes.
        mixed_precision: see `MixedPrecisionPolicy`.
        ignored_modules: whose parameters are left alone.
        param_init_fn: called with each module that has parameters or buffers on the meta device, to give them memory
            and values, before anything is divided.
        device_id: a CPU; None.
        sync_module_states: parameters and buffers become those of rank 0.
        forward_prefetch: gather the next unit while one computes. The order is that of ``modules()``.
        limit_all_gathers: has no effect: two units are gathered at most at a time anyway.
        use_orig_params: True; optimizers and checkpoints always see each parameter under its own name.
        ignored_states: parameters or modules that are left alone.
        device_mesh: one-dimensional, or (replicate, shard).
        wire_policy: see `WirePolicy`.

    Raises:
        ValueError, TypeError: as `fully_shard`; or arguments that contradict each other.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: Any = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: Any = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        wire_policy: WirePolicy | None = None,
    ) -> None:
        super().__init__()
        name = getattr(sharding_strategy, "name", sharding_strategy or "FULL_SHARD")
        mesh = _mesh_of(name, process_group, device_mesh)
        _check_device(device_id)
        check_offload("cpu_offload", cpu_offload)
        if not use_orig_params:
            raise ValueError(
                "use_orig_params is False, but parameters are not flattened here; leave it at True"
            )
        left_alone, ignored = _ignored(ignored_modules, ignored_states)
        if param_init_fn is not None:
            _initialise(module, param_init_fn)
        how: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": name in ("FULL_SHARD", "HYBRID_SHARD"),
            "mp_policy": as_mixed_precision("mixed_precision", mixed_precision),
            "offload_policy": cpu_offload,
            "wire_policy": wire_policy,
            "ignored_params": ignored,
            "sync_module_states": sync_module_states,
        }
        units = _chosen(module, auto_wrap_policy, left_alone)
        for unit in units:
            fully_shard(unit, **how)
        self.module = fully_shard(module, **how)
        # State dicts have the module's own names, also where the front is inside of another module.
        self.register_load_state_dict_pre_hook(_add_prefix)
        if forward_prefetch:
            for one, following in zip(reversed(units), list(reversed(units))[1:], strict=False):
                cast(FSDPModule, one).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
        if backward_prefetch is None:
            for each in (*units, module):
                cast(FSDPModule, each).set_modules_to_backward_prefetch([])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self.module(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`pycoll.clip_grad_norm_` of all parameters."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep whole gradients, for the next pass outside."""
        states = [s for m in self.module.modules() if (s := state_of(m)) is not None]
        before = [state.synchronises for state in states]
        for state in states:
            state.synchronises = False
        try:
            yield
        finally:
            for state, value in zip(states, before, strict=True):
                state.synchronises = value

    @staticmethod
    @contextmanager
    def summon_full_params(module: nn.Module, recurse: bool = True) -> Iterator[None]:
        """The module holds whole parameters inside; what is written to them is lost. Collective."""
        modules = module.modules() if recurse else [module]
        states = [s for m in modules if (s := state_of(m)) is not None]
        if recurse or not states:
            inner = getattr(module, "module", module)
            states = [s for m in inner.modules() if (s := state_of(m)) is not None]
        for state in states:
            state.unit.unshard()
        try:
            for state in states:
                state.unit.wait_for_unshard()
            yield
        finally:
            for state in states:
                state.unit.reshard()

    def __getattr__(self, name: str) -> Any:
        """What the front does not have, the module may have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module, under its own names: parts, as DTensors. Not collective; see `full_state_dict`."""
        return self.module.state_dict(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the module, under its own names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Those of the module, under its own names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)


def _add_prefix(front: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)


def _check_device(device_id: Any) -> None:
    is_cpu = isinstance(device_id, (str, torch.device)) and torch.device(device_id).type == "cpu"
    if device_id is not None and not is_cpu:
        raise ValueError(
            f"device_id is {device_id}; this build moves CPU tensors only: leave it out, or pass torch.device('cpu')"
        )


def _ignored(
    modules: Iterable[nn.Module] | None, states: Iterable[nn.Parameter] | Iterable[nn.Module] | None
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Modules, and all parameters, that are left alone."""
    chosen = set(modules or ())
    parameters: set[nn.Parameter] = set()
    for state in states or ():
        if isinstance(state, nn.Module):
            chosen.add(state)
        elif isinstance(state, nn.Parameter):
            parameters.add(state)
        else:
            raise TypeError(
                f"ignored_states has a {type(state).__name__}; give parameters or modules"
            )
    return chosen, parameters.union(p for m in chosen for p in m.parameters())


def _initialise(module: nn.Module, initialise: Callable[[nn.Module], None]) -> None:
    for each in module.modules():
        own = (*each.parameters(recurse=False), *each.buffers(recurse=False))
        if any(tensor.is_meta for tensor in own):
            initialise(each)


def _mesh_of(
    name: str, process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> DeviceMesh | None:
    if name == "NO_SHARD":
        raise ValueError("sharding_strategy NO_SHARD divides nothing; use DistributedDataParallel")
    if name not in ShardingStrategy.__members__:
        raise ValueError(
            f"sharding_strategy is {name!r}; give one of {', '.join(ShardingStrategy.__members__)}"
        )
    if not (process_group is None or isinstance(process_group, dist.ProcessGroup)):
        raise TypeError(
            f"process_group is a {type(process_group).__name__}; pass a process group of this rank, or None"
        )
    if process_group is not None and mesh is not None:
        raise ValueError("give process_group or device_mesh, not both")
    if name in _HYBRID and (mesh is None or mesh.ndim != 2):
        raise ValueError(f"sharding_strategy {name} needs a device_mesh of (replicate, shard)")
    if name not in _HYBRID and mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"sharding_strategy {name} needs a one-dimensional device_mesh, not {mesh.ndim} dims"
        )
    if process_group is not None:
        return DeviceMesh.from_group(process_group, "cpu")
    return mesh


def _chosen(root: nn.Module, policy: Any, ignored: Collection[nn.Module]) -> list[nn.Module]:
    """Modules that become units, inner ones first, without the root."""
    if policy is None:
        return []
    units: list[nn.Module] = []
    _walk(root, _asked(root, policy, ignored), set(ignored), units, is_root=True)
    return units


# Asked with recurse=True: whether to look inside of a module; with False: whether it becomes a unit. The number is that
# of elements that are in no unit yet.
Policy = Callable[[nn.Module, bool, int], bool]


def _asked(root: nn.Module, policy: Any, ignored: Collection[nn.Module]) -> Policy:
    if isinstance(policy, (set, frozenset, tuple, list)):
        classes = tuple(policy)
        wrong = [each for each in classes if not isinstance(each, type)]
        if wrong:
            raise TypeError(
                f"auto_wrap_policy has {wrong[0]!r}, which is no class; give classes of modules"
            )
        return lambda m, recurse, numel: recurse or isinstance(m, classes)
    if hasattr(policy, "_run_policy"):
        picked = policy._run_policy(root, set(ignored), {})
        return lambda m, recurse, numel: recurse or m in picked
    if not callable(policy):
        raise TypeError(
            f"auto_wrap_policy is a {type(policy).__name__}; pass a set of classes, a policy of torch's, or a function"
        )
    return lambda m, recurse, numel: bool(policy(module=m, recurse=recurse, nonwrapped_numel=numel))


def _walk(
    module: nn.Module,
    asked: Policy,
    seen: set[nn.Module],
    units: list[nn.Module],
    is_root: bool = False,
) -> int:
    """Appends units inside; returns the number of elements that are in none of them."""
    if module in seen:
        return 0
    seen.add(module)
    numel = sum(p.numel() for p in module.parameters())
    if asked(module, True, numel):
        numel = sum(p.numel() for p in module.parameters(recurse=False))
        for child in module.children():
            numel += _walk(child, asked, seen, units)
    has_forward = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if not is_root and has_forward and asked(module, False, numel):
        units.append(module)
        return 0
    return numel
