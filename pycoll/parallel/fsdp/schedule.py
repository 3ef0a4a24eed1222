"""When units are gathered and reduced: hooks of modules, and what a whole model has in common.

See docs/fsdp.md, "Order".
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from pycoll import collectives
from pycoll.parallel.fsdp.sharding import Sharding
from pycoll.parallel.fsdp.unit import Unit
from pycoll.parallel.model import tensors_in
from pycoll.parallel.passes import Token
from pycoll.tags import tag


@dataclass(eq=False)
class RootForward:
    """One forward of the root, which hooks of that forward hold on to.

    Attributes:
        order: units in the order of their forwards; one may be there several times.
        uses: forwards of a unit whose backwards are still to come.
    """

    order: list[UnitState] = field(default_factory=list)
    uses: Counter[UnitState] = field(default_factory=Counter)

    def prefetch_before(self, position: int) -> None:
        """Gathers the unit that ran before the `position`-th forward."""
        if 0 < position <= len(self.order):
            self.order[position - 1].gather()


class Iteration:
    """What the units under one root share: the forward of the root, and the backward pass under way."""

    def __init__(self, states: Sequence[UnitState]) -> None:
        self.states = list(states)
        self.forward = RootForward()
        self._token: weakref.ref[Token] | None = None
        self._reducing: UnitState | None = None
        # The backward pass makes a graph of its own, which needs whole parameters later.
        self.keeps_whole = False

    def begin_forward(self) -> None:
        """The root's forward begins."""
        self._clean_up()
        self.forward = RootForward()
        for state in self.states:
            # What hooks have left whole may be older than the parts.
            if state.gathered_by_hook:
                state.unit.reshard()
            state.unit.take_over()

    # --- the backward pass -------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """A backward pass has come to a unit, and is not over."""
        return self._token is not None and self._token() is not None

    def begin_backward(self) -> None:
        """Called in a backward pass, whenever it comes to a unit."""
        if self.in_backward:
            return
        self._clean_up()
        self.keeps_whole = False
        token = Token(lambda: None)
        self._token = weakref.ref(token)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, token))

    def _clean_up(self) -> None:
        """If the last backward pass has failed, drops what it has left. What it has sent, its peers have sent too."""
        if self._token is None:
            return
        self._token = None
        self._wait_for_reduction()
        for state in self.states:
            state.in_backward = state.postponed = state.reduced = False
            state.unit.drop_gradients()

    def reduce(self, state: UnitState) -> None:
        """Issues a unit's reduction. One is on its way at a time, which bounds memory."""
        self._wait_for_reduction()
        state.unit.reduce()
        self._reducing = state

    def _wait_for_reduction(self) -> None:
        state, self._reducing = self._reducing, None
        if state is not None:
            state.unit.finish_reduce(state.all_reduces)

    def _end(self, token: Token) -> None:
        reduced = False
        for state in reversed(self.states):
            if state.in_backward or state.postponed or state.unit.has_gradients():
                state.finish_backward()
            state.in_backward = False
        for state in self.states:
            reduced |= state.reduced
        self._wait_for_reduction()
        if reduced:
            self._settle()
        for state in self.states:
            state.release()
        self._token = None

    def _settle(self) -> None:
        """Parameters that any rank has used get their gradients. Collective."""
        by_sharding: dict[Sharding, list[UnitState]] = {}
        for state in self.states:
            if state.reduced:
                by_sharding.setdefault(state.unit.sharding, []).append(state)
                state.reduced = False
        for sharding, states in by_sharding.items():
            parameters = [p for s in states for p in s.unit.parameters if p.sharded.requires_grad]
            used = torch.tensor([p.used for p in parameters], dtype=torch.uint8)
            with tag("FSDP: which parameters were used"):
                for group in sharding.groups():
                    collectives.all_reduce(used, "max", group)
            for p, is_used in zip(parameters, used.tolist(), strict=True):
                if p.fresh is not None:
                    p.used = False
                if not is_used:
                    p.fresh = None
            with torch.no_grad():
                for p in parameters:
                    p.add_to_grad()


class UnitState:
    """A unit's hooks.

    Attributes:
        reshards_after_forward, reshards_after_backward: whether whole parameters are released then.
        synchronises: whether its backward reduces gradients; else they accumulate.
        all_reduces: on a two-dimensional mesh, whether reductions go over replicas too.
        unshards_in_backward: whether its backward gathers; not, if whole parameters are not needed there.
        forward_prefetch, backward_prefetch: units to gather when this one runs; None: for backward the one before.
    """

    def __init__(self, module: nn.Module, unit: Unit, reshards_after_forward: bool | None) -> None:
        self.module = weakref.ref(module)
        self.unit = unit
        self._asked_reshard = reshards_after_forward
        self.reshards_after_forward = reshards_after_forward is not False
        self.reshards_after_backward = True
        self.synchronises = True
        self.all_reduces = True
        self.unshards_in_backward = True
        self.forward_prefetch: list[UnitState] = []
        self.backward_prefetch: list[UnitState] | None = None
        self.iteration: Iteration | None = None
        self.is_root = False
        self.in_backward = False
        self.postponed = False
        self.reduced = False
        self.gathered_by_hook = False
        self.depth = 0  # forwards of the module that run now, one in another
        self._watching: list[Any] = []

    def gather(self) -> None:
        """Issues the unit's gather, unless that has happened."""
        self.gathered_by_hook = True
        self.unit.unshard()

    def release(self) -> None:
        """After backward."""
        self.stop_watching()
        assert self.iteration is not None
        if self.reshards_after_backward and not self.iteration.keeps_whole:
            self.unit.reshard()

    # --- forward -----------------------------------------------------------------------------------

    def find_iteration(self) -> Iteration:
        """That of the root, which is the first unit that runs."""
        if self.iteration is None:
            module = self.module()
            assert module is not None
            found = [(n, s) for n, m in module.named_modules() if (s := state_of(m)) is not None]
            iteration = Iteration([state for _, state in found])
            for name, state in found:
                if state.iteration is not None:
                    raise RuntimeError(
                        f"{name!r} has run on its own, as a root, and now runs inside of "
                        f"{type(module).__name__}; run the outermost sharded module first"
                    )
                state.iteration = iteration
                if name:
                    state.unit.name = name
            self.is_root = True
            if self._asked_reshard is None:
                self.reshards_after_forward = False
        assert self.iteration is not None
        return self.iteration

    @_disable_dynamo
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.depth += 1
        if self.depth > 1:  # the module calls itself
            return args, kwargs
        iteration = self.find_iteration()
        if self.is_root and not iteration.in_backward:
            iteration.begin_forward()
        self.gather()
        self.unit.wait_for_unshard()
        if not self.in_backward:
            for state in self.forward_prefetch:
                state.gather()
        policy = self.unit.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        if torch.is_grad_enabled():
            iteration.forward.uses[self] += 1
            args, kwargs = self._watch_inputs(args, kwargs, iteration.forward)
        return args, kwargs

    def _watch_inputs(self, args: Any, kwargs: Any, record: RootForward) -> tuple[Any, Any]:
        leaves, spec = tree_flatten((args, kwargs))
        chosen = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad]
        for i in chosen:
            if leaves[i].layout == torch.strided:
                # An alias: its gradient is what comes from this module alone.
                leaves[i] = leaves[i].view_as(leaves[i])
        if chosen:
            watched = [leaves[i] for i in chosen]
            register_multi_grad_hook(watched, lambda _: self._after_backward(record))
        result: tuple[Any, Any] = tree_unflatten(leaves, spec)
        return result

    @_disable_dynamo
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.depth > 1:
            return output
        policy = self.unit.policy
        if policy.output_dtype is not None:
            output = _cast(output, policy.output_dtype)
        iteration, outputs = self.find_iteration(), []
        if torch.is_grad_enabled():
            outputs = [t for t in tensors_in(output) if t.requires_grad]
        if outputs:
            record, position = iteration.forward, -1
            if not iteration.in_backward:  # else a checkpoint runs it again
                position = len(record.order)
                record.order.append(self)
            hook = partial(self._before_backward, record, position)
            for tensor in outputs:
                tensor.register_hook(hook)
        if torch.is_grad_enabled() and not outputs and self.needs_reduction():
            # Its result may have gone another way, which shows when a parameter gets a gradient.
            self._watch_parameters(iteration)
        elif not self.in_backward and (self.reshards_after_forward or not outputs):
            # Without a backward pass to come, nobody would release what is kept.
            self.unit.reshard(after_forward=bool(outputs))
        return output

    def leave_forward(self) -> None:
        """Called also if the forward has failed."""
        self.depth = max(0, self.depth - 1)

    def _watch_parameters(self, iteration: Iteration) -> None:
        self.stop_watching()
        for p in self.unit.parameters:
            if p.whole is not None and p.whole.requires_grad:
                hook = p.whole.register_hook(lambda _: iteration.begin_backward())
                self._watching.append(hook)

    def stop_watching(self) -> None:
        for hook in self._watching:
            hook.remove()
        self._watching.clear()

    # --- backward ----------------------------------------------------------------------------------

    def _before_backward(self, record: RootForward, position: int, _: Tensor) -> None:
        """A gradient has come to an output of the `position`-th forward."""
        iteration = self.iteration
        assert iteration is not None
        iteration.begin_backward()
        iteration.keeps_whole |= torch.is_grad_enabled()
        if self.in_backward:
            return
        self.in_backward = True
        if not self.unshards_in_backward:
            return
        self.gather()
        self.unit.wait_for_unshard()
        if self.backward_prefetch is None:
            record.prefetch_before(position)
        else:
            for state in self.backward_prefetch:
                state.gather()

    def _after_backward(self, record: RootForward) -> None:
        """The inputs of a forward have their gradients."""
        iteration = self.iteration
        assert iteration is not None
        iteration.begin_backward()
        record.uses[self] -= 1
        if record.uses[self] > 0:
            # Reduced together with what its earlier forwards get: sums of ranks are formed of whole sums.
            self.in_backward = False
            self.postponed = True
            self.unit.accumulate()
            self.release()
        else:
            self.finish_backward()

    def finish_backward(self) -> None:
        """Reduces gradients, or keeps them."""
        iteration = self.iteration
        assert iteration is not None
        self.in_backward = self.postponed = False
        if self.synchronises and self.needs_reduction():
            iteration.reduce(self)
            self.reduced = True
        else:
            self.unit.accumulate()
        self.release()

    def needs_reduction(self) -> bool:
        """Equal on all ranks."""
        return any(p.sharded.requires_grad for p in self.unit.parameters)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


_STATE = "_pycoll_fsdp_state"


def state_of(module: nn.Module) -> UnitState | None:
    """The hooks of a module that is a unit."""
    state: UnitState | None = module.__dict__.get(_STATE)
    return state


def attach(module: nn.Module, state: UnitState) -> None:
    """Makes a module a unit."""
    module.__dict__[_STATE] = state
    module.register_forward_pre_hook(state.before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(state.after_forward)
    module.register_forward_hook(lambda m, a, o: state.leave_forward(), always_call=True)
    # Whoever asks for a state dict means parts.
    module.register_state_dict_pre_hook(lambda m, prefix, keep_vars: state.unit.reshard())
    module.register_load_state_dict_pre_hook(lambda m, *_: state.unit.reshard())
