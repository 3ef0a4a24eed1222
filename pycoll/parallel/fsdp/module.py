"""`fully_shard`: makes units of modules, and what a module can do then."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import wraps
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pycoll.parallel.agreement import listed, raise_on_all
from pycoll.parallel.fsdp.parameter import (
    OWNER_ATTRIBUTE,
    ShardedParameter,
    contiguous_strides,
)
from pycoll.parallel.fsdp.policies import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    WirePolicy,
    as_mixed_precision,
    check_offload,
)
from pycoll.parallel.fsdp.schedule import UnitState, attach, state_of
from pycoll.parallel.fsdp.sharding import Sharding, rows_of, smaller_group
from pycoll.parallel.fsdp.unit import Unit
from pycoll.parallel.state import broadcast_tensors


class UnshardHandle:
    """Of a gather that has been issued."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Until the module holds whole parameters."""
        self._unit.wait_for_unshard()


class FSDPModule:
    """What a module is in addition once it has gone through `fully_shard`; methods are named as torch's."""

    def _state(self) -> UnitState:
        state = state_of(cast(nn.Module, self))
        assert state is not None
        return state

    def _states(self, recurse: bool) -> list[UnitState]:
        if not recurse:
            return [self._state()]
        modules = cast(nn.Module, self).modules()
        return [state for module in modules if (state := state_of(module)) is not None]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters, and lets its module hold them. Collective.

        Args:
            async_op: only issue the gather, and return a handle to wait for it.
        """
        state = self._state()
        unit, state.gathered_by_hook = state.unit, False
        unit.unshard()
        if async_op:
            return UnshardHandle(unit)
        unit.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Releases this unit's whole parameters."""
        self._state().unit.reshard()

    def set_requires_gradient_sync(self, value: bool, *, recurse: bool = True) -> None:
        """Whether backward passes reduce gradients; else they accumulate, whole, until one does."""
        for state in self._states(recurse):
            state.synchronises = value

    def set_requires_all_reduce(self, value: bool, *, recurse: bool = True) -> None:
        """Whether, on a two-dimensional mesh, reductions go over replicas too; else sums wait for one that does."""
        for state in self._states(recurse):
            state.all_reduces = value

    def set_reshard_after_forward(self, value: bool, recurse: bool = True) -> None:
        """Whether whole parameters are released after forward."""
        for state in self._states(recurse):
            state.reshards_after_forward = value
            state._asked_reshard = value

    def set_reshard_after_backward(self, value: bool, *, recurse: bool = True) -> None:
        """Whether whole parameters are released after backward. Keep them only while no optimizer steps."""
        for state in self._states(recurse):
            state.reshards_after_backward = value

    def set_is_last_backward(self, value: bool) -> None:
        """Accepted for programs that call it; forward passes are remembered as long as their outputs are."""

    def set_unshard_in_backward(self, value: bool) -> None:
        """Whether this unit's backward needs its parameters (an embedding's does not)."""
        self._state().unshards_in_backward = value

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Units whose gather is issued when this one's forward begins, in this order."""
        self._state().forward_prefetch = _states_of("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Units whose gather is issued when this one's backward begins; without this, the one that ran before it."""
        self._state().backward_prefetch = _states_of("set_modules_to_backward_prefetch", modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides sums of gradients by this instead of the number of ranks.

        Raises:
            ValueError: `factor` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"the factor must be positive, got {factor}")
        self._state().unit.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """torch's earlier name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        for state in self._states(recurse=True):
            state.unit.reshard()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(
            "a sharded module cannot be copied or pickled, as its parts lie on several ranks; copy it before "
            "fully_shard, or move its state with torch.distributed.checkpoint.state_dict"
        )

    def share_memory(self) -> Any:
        raise RuntimeError(
            "a sharded module cannot be moved to torch's shared memory; its parts lie in memory that the ranks of the "
            "host map already"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({})


def _states_of(method: str, modules: Sequence[Any]) -> list[UnitState]:
    states = []
    for module in modules:
        state = state_of(module) if isinstance(module, nn.Module) else None
        if state is None:
            raise ValueError(f"{method} got a {type(module).__name__}, which is not sharded")
        states.append(state)
    return states


# Classes of sharded modules, by the class they had.
_classes: dict[type, type] = {}


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    wire_policy: WirePolicy | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    sync_module_states: bool = False,
) -> nn.Module:
    """Divides a module's parameters among ranks, those that units inside it have already excepted.

    Call it on inner modules first and on the whole model last, on all ranks alike; make optimizers afterwards. See
    docs/fsdp.md. Not collective, but for groups that it makes and with `sync_module_states`; ranks have to have equal
    parameters otherwise.

    Args:
        module: with CPU or meta parameters, which become DTensors of this rank's rows.
        mesh: one-dimensional, or (replicate, shard): hybrid sharding. None: all ranks of the default group.
        reshard_after_forward: True: ZeRO-3; False: whole parameters stay until after backward, ZeRO-2; a number
            k that divides the ranks: each of k neighbours keeps a k-th. None: True, and False for the root.
        mp_policy: dtypes, as pycoll's or torch's class says them; None: the parameters' own.
        offload_policy: where parts lie; see `CPUOffloadPolicy`. torch's will do, too.
        wire_policy: 8-bit or 16-bit gathers and reductions; None: as `mp_policy` says.
        ignored_params: left alone.
        sync_module_states: the module's own parameters and buffers (not those of units inside) become those of
            rank 0 of the mesh before they are divided. On the meta device modules of other ranks get memory.

    Returns:
        `module`, which is an `FSDPModule` from now on.

    Raises:
        ValueError: the module is a unit already or has no forward, a parameter is shared with another unit, has no
            dims, or is on another device; `mesh` or `reshard_after_forward` does not fit; or, on all ranks, what
            `sync_module_states` is to send is on the meta device.
        TypeError: an argument is of a wrong type.
    """
    _check_arguments(module, reshard_after_forward, wire_policy, ignored_params)
    precision = as_mixed_precision("mp_policy", mp_policy)
    check_offload("offload_policy", offload_policy)
    sharding = Sharding.of(mesh)
    kept_by = None
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        kept_by = _keepers(sharding, reshard_after_forward)
        # A group of all ranks keeps what is kept anyway; one of one rank keeps everything.
        reshard_after_forward = reshard_after_forward > 1
    ignored = {id(p) for p in ignored_params}
    owned = _owned(module, ignored)
    _check(owned)
    if sync_module_states:
        _synchronise(module, [p for p, _ in owned], sharding)
        owned = _owned(module, ignored)
    parameters = [_shard(places, p, sharding) for p, places in owned]
    wire = wire_policy or WirePolicy()
    name = f"{type(module).__name__}#{sharding.next_number()}"
    unit = Unit(name, parameters, sharding, precision, wire, kept_by)
    attach(module, UnitState(module, unit, reshard_after_forward))
    _change_class(module)
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Lets a method run as the module's forward does: with whole parameters, and seen by backward passes.

    Only a call of the module itself finds them otherwise. As torch's function; a module that is not sharded stays as
    it is.

    Raises:
        AttributeError: the module has no such method.
    """
    state, method = state_of(module), getattr(module, method_name)
    if state is None:
        return

    @wraps(method)
    def as_forward(*args: Any, **kwargs: Any) -> Any:
        try:
            args, kwargs = state.before_forward(module, args, kwargs)
            return state.after_forward(module, args, method(*args, **kwargs))
        finally:
            state.leave_forward()

    setattr(module, method_name, as_forward)


def _check_arguments(
    module: Any, reshard_after_forward: Any, wire_policy: Any, ignored_params: Any
) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; pass a torch.nn.Module")
    name = type(module).__name__
    if state_of(module) is not None:
        raise ValueError(f"this {name} has been sharded already; shard each module once")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(f"{name} has no forward; shard the modules in it, one by one")
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, int)):
        raise TypeError(
            f"reshard_after_forward is a {type(reshard_after_forward).__name__}; pass True, False, a number of "
            "ranks or None"
        )
    if wire_policy is not None and not isinstance(wire_policy, WirePolicy):
        raise TypeError(f"wire_policy is a {type(wire_policy).__name__}; pass a pycoll.WirePolicy")
    wrong = [p for p in ignored_params if not isinstance(p, nn.Parameter)]
    if wrong or isinstance(ignored_params, torch.Tensor):
        kind = type(wrong[0] if wrong else ignored_params).__name__
        raise TypeError(f"ignored_params is, or has, a {kind}; pass a collection of Parameters")


def _keepers(sharding: Sharding, count: int) -> Any:
    """The group whose ranks keep a part of whole parameters after forward; None if there is nothing to divide."""
    if count in (1, sharding.size):
        return None
    return smaller_group(sharding, count)


Places = list[tuple[nn.Module, str, str]]  # module, name there, full name


def _modules_of_unit(module: nn.Module, prefix: str = "") -> Iterable[tuple[str, nn.Module]]:
    """The module and those inside it, without units inside."""
    yield prefix, module
    for name, child in module.named_children():
        if state_of(child) is None:
            yield from _modules_of_unit(child, f"{prefix}.{name}" if prefix else name)


def _owned(module: nn.Module, ignored: set[int]) -> list[tuple[nn.Parameter, Places]]:
    """Parameters that the unit is to have, each with all places that hold it."""
    places: dict[nn.Parameter, Places] = {}
    seen: set[int] = set()
    for prefix, inner in _modules_of_unit(module):
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        for name, p in inner._parameters.items():
            if p is not None and id(p) not in ignored:
                full = f"{prefix}.{name}" if prefix else name
                places.setdefault(p, []).append((inner, name, full))
    return list(places.items())


def _check(owned: Sequence[tuple[nn.Parameter, Places]]) -> None:
    for p, places in owned:
        name = places[0][2]
        owner = getattr(p, OWNER_ATTRIBUTE, None)
        if owner is not None:
            raise ValueError(
                f"parameter {name!r} is also {owner}, which has been divided already; tied parameters have to "
                "be in one unit: shard the module that holds both, not the one with only one of them"
            )
        if isinstance(p, DTensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor already, with {p.placements}; fully_shard takes plain parameters: "
                "shard inner modules before the module around them"
            )
        if p.dim() == 0:
            raise ValueError(
                f"parameter {name!r} has no dims and cannot be divided; give it shape (1,), or pass it in "
                "ignored_params"
            )
        if p.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"parameter {name!r} is on {p.device}; this build moves CPU tensors only"
            )


@torch.no_grad()
def _shard(places: Places, p: nn.Parameter, sharding: Sharding) -> ShardedParameter:
    begin, end = rows_of(p.shape[0], sharding.size, sharding.rank)
    # A copy: the whole parameter's memory is to go.
    part = p.detach()[begin:end].clone(memory_format=torch.contiguous_format)
    dtensor = DTensor.from_local(
        part,
        sharding.mesh,
        sharding.placements,
        run_check=False,
        shape=p.shape,
        stride=contiguous_strides(p.shape),
    )
    sharded = nn.Parameter(dtensor, requires_grad=p.requires_grad)
    for name, value in p.__dict__.items():
        setattr(sharded, name, value)
    owner = f"{places[0][2]!r} of a {type(places[0][0]).__name__}"
    setattr(p, OWNER_ATTRIBUTE, owner)
    held = [(module, name) for module, name, _ in places]
    result = ShardedParameter(places[0][2], held, p.shape, p.dtype, sharding, sharded)
    result.hold(sharded)
    return result


def _synchronise(module: nn.Module, parameters: Sequence[nn.Parameter], sharding: Sharding) -> None:
    """Collective. What the unit owns becomes what rank 0 of the mesh has."""
    chosen = {id(p) for p in parameters}
    held: list[tuple[dict[str, Any], str]] = []
    empty: list[str] = []
    made: dict[int, Any] = {}
    for _, inner in _modules_of_unit(module):
        for name, p in inner._parameters.items():
            if p is not None and id(p) in chosen:
                held.append((inner._parameters, name))
        held += [(inner._buffers, n) for n, b in inner._buffers.items() if b is not None]
    for where, name in held:
        old = where[name]
        if old.is_meta:
            empty.append(name)
            if id(old) not in made:
                fresh: Any = torch.empty_like(old, device="cpu")
                if isinstance(old, nn.Parameter):
                    fresh = nn.Parameter(fresh, requires_grad=old.requires_grad)
                made[id(old)] = (fresh, old)  # `old` is kept, so that its id stays its own
            where[name] = made[id(old)][0]
    is_source = all(group.rank() == 0 for group in sharding.groups())
    problem = (
        f"sync_module_states is to send {listed(empty)} of a {type(module).__name__} from rank 0 of the mesh, "
        "where they are on the meta device and have no values; initialise the model there"
    )
    raise_on_all(problem if is_source and empty else "", sharding.groups())
    tensors = list({id(t): t for t in (where[name].detach() for where, name in held)}.values())
    for group in sharding.groups():
        broadcast_tensors(tensors, 0, group)


def _change_class(module: nn.Module) -> None:
    plain = type(module)
    if plain not in _classes:
        _classes[plain] = type(f"FSDP{plain.__name__}", (FSDPModule, plain), {})
    module.__class__ = _classes[plain]
