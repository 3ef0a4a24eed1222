"""DistributedDataParallel: one model, copies of it on all ranks, gradients averaged during the backward pass."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from pycoll.bucket import bucket_caps
from pycoll.parallel.arguments import delayed_names, devices_of, group_of
from pycoll.parallel.join import DDPJoinHook, any_rank_synchronises, highest_rank_with
from pycoll.parallel.mixed_precision import ParameterCasts, Precision, cast_buffers
from pycoll.parallel.model import (
    sparse_parameters,
    step_in_backward,
    tensors_in,
    with_tensors,
    without_shards,
)
from pycoll.parallel.reducer import Reducer
from pycoll.parallel.reduction import Settings
from pycoll.parallel.state import broadcast_buffers as send_buffers
from pycoll.parallel.state import broadcast_tensors, places_of_buffers
from pycoll.parallel.timeline import Timeline, make_timeline
from pycoll.parallel.verification import check_in_sync, verify_equal_models

Hook = Callable[[Any, Any], torch.futures.Future]


class DistributedDataParallel(nn.Module, Joinable):
    """Wraps a model so that every backward pass averages gradients over the ranks of a group.

    To be constructed on all ranks of the group at the same point. Arguments are torch's; what differs:

    - Any number of forward and backward passes in any order leave equal gradients on all ranks: several backward passes
      through one forward, several forwards before their backwards, losses that reach the model past its
      ``forward`` (``ddp.module(x)``). Each backward pass averages the whole gradients, so that gradients accumulated
      under `no_sync` come along.
    - Whether a backward pass synchronises is decided by the forward passes whose outputs it reaches: it does unless all
      of them ran under `no_sync`. A loss that reaches no output of the wrapper synchronises unless ``backward``
      itself is called under `no_sync`.
    - The buckets never change the result: see `pycoll.bucket`.
    - Ranks compare names, shapes, dtypes, ``requires_grad`` and devices of parameters, and these arguments.
    - ``requires_grad`` may change later, on all ranks alike; the next forward sees it.

    Args:
        module: the model, on the CPU or on GPUs.
        device_ids: the one GPU that the model is on; then inputs are moved there. None: they lie where they belong.
        output_device: for code that looks; outputs stay where the model makes them.
        dim: of batches; unused, as inputs are not split.
        broadcast_buffers: the old name of `forward_sync_buffers`.
        init_sync: compare the ranks' models and take parameters and buffers of rank 0. Without it ranks have to be
            equal.
        process_group: of pycoll's backend; None: the default group.
        bucket_cap_mb: MiB after which a bucket is closed; None: 25, and 1 for the first bucket.
        find_unused_parameters: ranks may leave parameters without gradient. Those that no rank has used keep their
            gradient (None stays None); where some rank has used them, the others count as zeros.
        check_reduction: ignored, as in torch.
        gradient_as_bucket_view: gradients lie in the buckets, which saves memory and copies. Then a gradient kept
            from an earlier step is overwritten by the next one.
        static_graph: every pass uses every parameter as often as the first one did; others raise. Allows parameters
            in several reentrant checkpoints together with `gradient_as_bucket_view`.
        delay_all_reduce_named_params: names and parameters whose gradients, whatever they hold by then, travel with
            that of `param_to_hook_all_reduce`, in a bucket of their own. None of them is ever missing.
        param_to_hook_all_reduce: the parameter that they wait for; of their dtype.
        mixed_precision: torch's ``_MixedPrecision``. Forward and backward compute in `param_dtype`, gradients travel in
            `reduce_dtype` (added in float32, rounded once), parameters and ``grad`` stay as they are, and so
            does accumulation. Sparse gradients travel as they are. Gradients are never views of buckets then.
        device_mesh: one-dimensional, in place of `process_group`.
        bucket_cap_mb_list: MiB of the first buckets in ready order; the last one holds for the rest.
        batched_grad_copy, skip_all_reduce_unused_params: accepted; copies are always batched.
        forward_sync_buffers: every forward takes rank 0's buffers first. None: as `broadcast_buffers`, else True.
        first_bucket_mb: MiB of the first bucket, whatever the others have.
        check_nan: before a reduction, look for infinities and NaN, and raise on all ranks with parameter and rank.

    Raises:
        RuntimeError: the ranks' models differ, or no parameter needs a gradient.
        ValueError: an argument is out of its range, or the group's backend is not pycoll.
        TypeError: an argument is of a wrong type.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        first_bucket_mb: float | None = None,
        check_nan: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.process_group = group_of(process_group, device_mesh)
        self.module = without_shards(module)
        self.dim = dim
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        wanted = True if broadcast_buffers is None else broadcast_buffers
        self.forward_sync_buffers = wanted if forward_sync_buffers is None else forward_sync_buffers
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.mixed_precision = mixed_precision
        self._precision = Precision.of(mixed_precision)
        self._settings = Settings(
            tuple(bucket_caps(bucket_cap_mb, bucket_cap_mb_list, first_bucket_mb)),
            find_unused_parameters,
            static_graph,
            gradient_as_bucket_view and self._precision.reduce_dtype is None,
            check_nan,
            self._precision.reduce_dtype,
            *delayed_names(module, delay_all_reduce_named_params, param_to_hook_all_reduce),
        )
        self._opaque_output: bool | None = None
        self._divide_by_initial_world_size = True
        self.device_ids, self.output_device = devices_of(module, device_ids, output_device)
        if init_sync:
            self._verify()
            state = [t for _, t in self._named_state()]
            broadcast_tensors(state, 0, self.process_group)
        cast_buffers(self._named_buffers(), self._precision.buffer_dtype)
        self.reducer = self._make_reducer()
        self._take_over_optimizers()

    # --- construction ------------------------------------------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        """`forward_sync_buffers` by its old name."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        ignored = self.parameters_to_ignore
        return [(n, p) for n, p in self.module.named_parameters() if n not in ignored]

    def _named_buffers(self) -> list[tuple[str, Tensor]]:
        ignored = self.parameters_to_ignore
        return [(n, b) for n, b in self.module.named_buffers() if n not in ignored]

    def _named_state(self) -> list[tuple[str, Tensor]]:
        return [*((n, p.detach()) for n, p in self._named_parameters()), *self._named_buffers()]

    def _verify(self) -> None:
        settings = {
            **dataclasses.asdict(self._settings),
            "forward_sync_buffers": self.forward_sync_buffers,
            "the list of ignored parameters": sorted(self.parameters_to_ignore),
            "the list of buffers": [
                [n, list(b.shape), str(b.dtype)] for n, b in self._named_buffers()
            ],
        }
        settings["bucket caps in bytes"] = list(settings.pop("caps"))
        settings["mixed_precision"] = str(self._precision)
        settings["delay_all_reduce_named_params"] = list(settings.pop("delayed"))
        settings["param_to_hook_all_reduce"] = settings.pop("delayed_until")
        del settings["reduce_dtype"]  # of mixed_precision
        verify_equal_models(self._named_parameters(), settings, self.process_group)

    def _make_reducer(self) -> Reducer:
        named = self._named_parameters()
        self._tracked = [p for _, p in named]
        self._buffer_places = places_of_buffers(self.module, self.parameters_to_ignore)
        self._tracked_grads = [p.requires_grad for p in self._tracked]
        trainable = [(name, p) for name, p in named if p.requires_grad]
        if not trainable:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameters that "
                "require a gradient."
            )
        sparse = sparse_parameters(self.module)
        # Weak: a wrapper that nobody has any more goes at once, and its hooks with it.
        ask = weakref.WeakMethod(self._synchronise_by_default)

        def synchronise_by_default() -> bool:
            method = ask()
            return method is None or method()

        reducer = Reducer(
            trainable,
            frozenset(name for name, p in trainable if id(p) in sparse),
            self.process_group,
            self._settings,
            synchronise_by_default,
        )
        reducer.install_hooks()
        if self._precision.param_dtype is not None:
            ignored = frozenset(self.parameters_to_ignore)
            reducer.casts = ParameterCasts(self.module, self._precision.param_dtype, ignored)
        return reducer

    def _synchronise_by_default(self) -> bool:
        """For a backward pass that has reached no output."""
        return (
            self.require_backward_grad_sync if self._opaque_output is None else self._opaque_output
        )

    def _take_over_optimizers(self) -> None:
        """torch's ``_apply_optimizer_in_backward`` steps when a gradient is there; it has to be reduced first."""
        if not any(hasattr(p, "_in_backward_optimizers") for p in self._tracked):
            return
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map as handles,
        )

        for p in self._tracked:
            for handle in handles.get(p, []):
                handle.remove()
        self.reducer.on_bucket.append(step_in_backward)

    # --- forward -----------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes inside have backward passes that add to this rank's gradients only.

        What counts is where the forward runs, as in torch: a backward inside of a forward outside synchronises.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        self._before_forward()
        if self.device_ids is not None:
            here = torch.device("cuda", self.device_ids[0])
            inputs, kwargs = with_tensors((inputs, kwargs), lambda tensor: tensor.to(here))
        casts = self.reducer.casts
        if casts is None:
            return self._after_forward(self.module(*inputs, **kwargs))
        with casts.forward():
            output = self.module(*casts.inputs(inputs), **casts.inputs(kwargs))
        return self._after_forward(output)

    @_disable_dynamo
    def _before_forward(self) -> None:
        trains = torch.is_grad_enabled() and self.require_backward_grad_sync
        if trains:
            self.reducer.before_forward()
            if [p.requires_grad for p in self._tracked] != self._tracked_grads:
                self._requires_grad_changed()
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
            self.reducer.divisor = self._active_divisor(work)
        elif not self._join_config.enable:
            self.reducer.divisor = None
        if self._join_config.enable:
            any_rank_synchronises(trains, self.process_group)
        if self._syncs_buffers(trains):
            self._sync_buffers()

    def _requires_grad_changed(self) -> None:
        self._verify()
        before = self.reducer
        before.remove_hooks()
        self.reducer = self._make_reducer()
        self.reducer.hook, self.reducer.hook_state = before.hook, before.hook_state
        self.reducer.on_bucket = before.on_bucket
        self.reducer._num_passes = before._num_passes

    @_disable_dynamo
    def _after_forward(self, output: Any) -> Any:
        trains = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = trains
        if torch.is_grad_enabled():
            synchronises, reducer = self.require_backward_grad_sync, self.reducer
            found = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
            for tensor in found:
                # Returns None, which leaves the gradient as it is.
                tensor.register_hook(lambda _, r=reducer, s=synchronises: r.output_reached(s))
            self._opaque_output = None if found else synchronises
        return output

    def _syncs_buffers(self, trains: bool) -> bool:
        wanted = trains or self.require_forward_param_sync
        return wanted and self.forward_sync_buffers and bool(self._buffer_places)

    def _sync_buffers(self, absent: bool = False) -> None:
        src = 0
        if self._join_config.enable:
            src = highest_rank_with(not absent, self.process_group)
        send_buffers(self._buffer_places, src, self.process_group)

    # --- hooks and tools ---------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Lets `hook(state, bucket)` reduce buckets in place of ``all_reduce``.

        Args:
            state: the hook's own.
            hook: gets a `pycoll.bucket.GradBucket`, whose methods are torch's, and returns a future of the means as
                one flat tensor. torch's hooks work unchanged. A hook of unknown origin is called for one bucket after
                the other, so that collectives that it starts later keep their order; set ``hook.may_overlap = True``
                on one that calls a single collective, right away.

        Raises:
            TypeError: `hook` cannot be called.
            RuntimeError: there is a hook already.
        """
        if not callable(hook):
            raise TypeError(
                f"the communication hook is a {type(hook).__name__} and cannot be called"
            )
        if self.reducer.hook is not None:
            raise RuntimeError("register_comm_hook can only be called once.")
        self.reducer.hook, self.reducer.hook_state = hook, state

    def timeline(self) -> Timeline:
        """What buckets did in the last backward passes of this rank."""
        return make_timeline(self.reducer.rank, list(self.reducer.history), self.process_group)

    def check_in_sync(self) -> None:
        """Collective. Compares parameters and buffers of all ranks bit for bit.

        Raises:
            RuntimeError: on all ranks, with the first tensor that differs and where.
        """
        check_in_sync(self.module, self.process_group, frozenset(self.parameters_to_ignore))

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, names: Sequence[str]
    ) -> None:
        """Names of parameters and buffers of `module` that wrappers made from now on leave alone."""
        module._ddp_params_and_buffers_to_ignore = list(names)  # type: ignore[assignment]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in names:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    def _set_static_graph(self) -> None:
        """torch's other way to say static_graph=True. Raises RuntimeError after the first backward pass."""
        if self.reducer.history:
            raise RuntimeError(
                "_set_static_graph() should be called before training loop starts, after construction"
            )
        self.static_graph = True
        self._settings = dataclasses.replace(self._settings, static_graph=True)
        self.reducer.remove_hooks()
        hook, state = self.reducer.hook, self.reducer.hook_state
        self.reducer = self._make_reducer()
        self.reducer.hook, self.reducer.hook_state = hook, state

    # --- uneven inputs -----------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of batches.

        Ranks that are out of batches take part in the others' collectives until all are; then all take the model of a
        rank that came last. One backward pass a forward pass inside.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks; else of those that still have
                batches.
            enable: False makes the context do nothing.
            throw_on_early_termination: raise on all ranks as soon as one is out of batches.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return DDPJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    def _active_divisor(self, work: Any) -> int | None:
        """`work`: of the context's own sum of ones, which has ended."""
        if self._divide_by_initial_world_size:
            return None
        return int(work.result()[0].item())

    # --- copies ------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """A wrapper of its own on the same group. Not collective. Communication hooks are not copied."""
        memo[id(self.process_group)] = self.process_group
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        state = copy.deepcopy(self.__getstate__(), memo)
        duplicate.__setstate__({**state, "process_group": self.process_group})
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in (
            "reducer",
            "process_group",
            "_tracked",
            "_tracked_grads",
            "_buffer_places",
        ):
            state.pop(name, None)
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Of a pickle: on the default group, which has to exist. Not collective."""
        state = dict(state)
        group = state.pop("process_group", None)
        super().__setstate__(state)
        self.__dict__.update(state)
        self.process_group = group if group is not None else group_of(None, None)
        self.reducer = self._make_reducer()
        self._take_over_optimizers()
