"""Sharded models: checkpoints, memory, what travels, failures, torch.compile."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_fsdp import WIDTH, Block, Network, Run, loss_of, rows, shard
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import pycoll
from pycoll.testing import RankPool, run_ranks

pytestmark = pytest.mark.slow

Pools = Callable[[int], RankPool]
MIB = 1 << 20


def sharded_network(run: Run | None = None) -> Any:
    model = Network()
    shard(model, run or Run())
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model(rows(number, 0))).backward()  # the same on all ranks and any number of them
    optimizer.step()


# --- checkpoints -----------------------------------------------------------------------------------


def saves(folder: str) -> dict[str, Any]:
    model = sharded_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(2):
        step(model, optimizer, number)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "model": pycoll.full_state_dict(model, rank0_only=True),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def loads(folder: str) -> dict[str, Any]:
    model = sharded_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = {
        "model": pycoll.full_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    found = copy.deepcopy(found)
    step(model, optimizer, 2)  # it trains on
    return found


def test_checkpoints_load_on_another_number_of_ranks(pool: Pools, tmp_path: Any) -> None:
    saved = pool(3).run(saves, str(tmp_path))[0]
    assert set(saved["model"]) == set(Network().state_dict())
    for world_size in (1, 2, 4):
        found = pool(world_size).run(loads, str(tmp_path))[0]
        for name, value in saved["model"].items():
            assert torch.equal(found["model"][name], value), name
        for name, state in saved["optimizer"]["state"].items():
            for key, value in state.items():
                assert torch.equal(found["optimizer"]["state"][name][key], value), (name, key)


# --- memory ----------------------------------------------------------------------------------------


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest sum of bytes of storages that live at a time, looked at after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves((args, result)):
            if isinstance(tensor, DTensor):
                tensor = tensor._local_tensor
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage)
        self.look()
        return result

    def look(self) -> None:
        total = 0
        for key, reference in list(self._storages.items()):
            if reference.expired():
                del self._storages[key]
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                total += storage.nbytes()
        self.peak = max(self.peak, total)


def peak_of_a_step(prefetches: bool) -> tuple[int, int, int]:
    """Measured, bound, and what the whole model state would be."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    for layer in model:
        pycoll.fully_shard(layer)
    pycoll.fully_shard(model)
    if not prefetches:
        for layer in model:
            layer.set_modules_to_backward_prefetch([])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    x = torch.ones(1, 256)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    report = pycoll.memory_report(model, optimizer)
    with Watch() as watch:
        model(x).sum().backward()
        optimizer.step()
    return watch.peak, report.peak, report.predicted[0]


def test_peak_memory(pool: Pools) -> None:
    """Model state / n and the two largest units, whole parameters and whole gradients."""
    for prefetches in (False, True):
        for peak, bound, whole in pool(4).run(peak_of_a_step, prefetches):
            assert peak <= 1.1 * bound
            assert peak > whole / 4  # it has been measured at all
            assert bound < 0.7 * whole


def reports() -> None:
    n = dist.get_world_size()
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    pycoll.fully_shard(model[0])
    pycoll.fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    report = pycoll.memory_report(model, optimizer)
    p = (64 + 16) * 4
    assert report.num_parameters == 80
    assert report.predicted == {0: 4 * p, 1: 2 * p + 2 * p // n, 2: p + 3 * p // n, 3: 4 * p // n}
    assert report.parameters == 4 * (-(-8 // n) * 8 + 2 * -(-8 // n))
    assert (report.gradients, report.optimizer, report.whole) == (0, 0, 0)
    sizes = [(name.partition("#")[0], nbytes) for name, nbytes in report.units]
    assert sizes == [("Linear", 4 * n * -(-8 // n) * 8), ("Sequential", 8 * n * -(-8 // n))]
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    report = pycoll.memory_report(model, optimizer)
    local = sum(p.to_local().numel() for p in model.parameters()) * 4
    assert report.gradients == local
    assert report.optimizer == 2 * local + 4 * 3  # a counter of steps a parameter
    assert report.buffers == 4 * 16 + 8
    model[0].unshard()
    assert pycoll.memory_report(model).whole == 4 * n * -(-8 // n) * 8
    text = str(report)
    assert "predicted, ZeRO-3" in text
    assert "80 parameters" in text
    with pytest.raises(ValueError, match="Linear has no sharded module"):
        pycoll.memory_report(nn.Linear(2, 2))


def test_memory_report(pool: Pools) -> None:
    for world_size in (2, 3):
        pool(world_size).run(reports)


# --- what travels ----------------------------------------------------------------------------------


def on_the_wire(gather: Any, reduce: Any) -> tuple[float, float, int]:
    """Largest relative errors of weights and gradients, and bytes moved."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = nn.Linear(251, 127, bias=False)  # no even parts: rows of padding share blocks
    whole = plain.weight.detach().clone()
    model: Any = pycoll.fully_shard(plain, wire_policy=pycoll.WirePolicy(gather, reduce))
    model.unshard()
    used = model.weight.detach().clone()
    everyone = [torch.empty_like(used) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, used)
    assert all(torch.equal(used, other) for other in everyone)
    model.reshard()
    x = torch.randn(4, 251, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    exact = torch.nn.functional.linear(x, used.requires_grad_()).square().mean()
    (grad,) = torch.autograd.grad(exact, [used]) if used.grad is None else (used.grad,)
    pycoll.all_reduce(grad, "avg")
    moved = sum(
        e["bytes_written"]
        for e in pycoll.events()
        if e["operation"] in ("all_gather", "reduce_scatter")
    )
    error = (model.weight.grad.full_tensor() - grad).abs().max() / grad.abs().max()
    return float((used.detach() - whole).abs().max() / whole.abs().max()), float(error), moved


def test_wire_dtypes(pool: Pools) -> None:
    with pytest.raises(ValueError, match=r"WirePolicy.gather is torch.float32; give one of float8"):
        pycoll.WirePolicy(torch.float32)
    with pytest.raises(ValueError, match=r"block must be 1 to 1024, got 0"):
        pycoll.WirePolicy(torch.int8, block=0)
    plain = pool(2).run(on_the_wire, None, None)[0]
    assert plain[0] == 0
    assert plain[1] < 1e-6
    for gather, reduce in ((torch.int8, torch.int8), (torch.bfloat16, torch.float8_e4m3fn)):
        weights, grads, _ = pool(2).run(on_the_wire, gather, reduce)[0]
        assert 0 < weights < 0.01
        assert 0 < grads < 0.1


# --- what is refused, and failures -----------------------------------------------------------------


def refusals() -> None:
    model = Network()
    pycoll.fully_shard(model.out)  # has the weight that `first` is tied to
    with pytest.raises(
        ValueError, match=r"'first.weight' is also 'weight' of a Linear.*tied parameters have to"
    ):
        pycoll.fully_shard(model)
    with pytest.raises(ValueError, match="has been sharded already"):
        pycoll.fully_shard(model.out)
    with pytest.raises(ValueError, match="ModuleList has no forward"):
        pycoll.fully_shard(model.blocks)
    with pytest.raises(TypeError, match="mesh is a int"):
        pycoll.fully_shard(Block(), 3)
    with pytest.raises(ValueError, match=r"reshard_after_forward=5 does not divide the 2 ranks"):
        pycoll.fully_shard(Block(), reshard_after_forward=5)
    with pytest.raises(
        TypeError, match=r"mp_policy is a dtype; pass a pycoll.MixedPrecisionPolicy"
    ):
        pycoll.fully_shard(Block(), mp_policy=torch.bfloat16)
    with pytest.raises(ValueError, match=r"param_dtype is torch.int8; give float16"):
        pycoll.MixedPrecisionPolicy(torch.int8)
    with pytest.raises(
        ValueError, match=r"set_modules_to_forward_prefetch got a Linear, which is not"
    ):
        model.out.set_modules_to_forward_prefetch([nn.Linear(1, 1)])
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
            attempt(model.out)
    with pytest.raises(ValueError, match=r"max_norm must not be negative, got -1"):
        pycoll.clip_grad_norm_(model.parameters(), -1)


def test_refusals(pool: Pools) -> None:
    pool(2).run(refusals)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("no gradient")


def goes_on_after_a_failure() -> None:
    """All ranks fail in a backward pass; the next step is as if nothing had happened."""
    torch.manual_seed(0)
    model, other = sharded_network(), sharded_network()
    hook = model.blocks[1].register_forward_hook(lambda m, a, out: Fails.apply(out))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    with pytest.raises(ValueError, match="no gradient"):
        loss_of(model(rows(0, dist.get_rank()))).backward()
    hook.remove()
    for number in (1, 2):
        for m, optimizer in zip((model, other), optimizers, strict=True):
            step(m, optimizer, number)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())


def test_a_failed_backward_leaves_nothing_behind(pool: Pools) -> None:
    pool(2).run(goes_on_after_a_failure)


def one_rank_raises() -> str:
    model = sharded_network()
    if dist.get_rank() == 1:
        model.blocks[2].register_forward_pre_hook(lambda m, a: 1 / 0)
    try:
        loss_of(model(rows(0, 0))).backward()
    except ZeroDivisionError:
        dist.distributed_c10d._abort_process_group()
        return ""
    except Exception as error:
        return str(error)
    return "no error"


def test_a_failing_rank_is_named_with_the_unit() -> None:
    text, _ = run_ranks(one_rank_raises, 2, timeout=60)
    assert "rank 0 could not gather the parameters of 'blocks.1'" in text, text  # it comes next
    assert "rank 1" in text


def ranks_go_apart() -> str:
    model = sharded_network()
    rank = dist.get_rank()
    try:
        model.blocks[rank](rows(0, 0))
    except Exception as error:
        return str(error)
    return "no error"


def test_ranks_that_gather_different_units() -> None:
    for text in run_ranks(ranks_go_apart, 2, timeout=60):
        assert "FSDP" in text
        assert "gather" in text


# --- torch.compile and the front -------------------------------------------------------------------


def compiled() -> None:
    rank = dist.get_rank()
    plain, model = sharded_network(), Network()
    for i in range(3):
        model.blocks[i] = torch.compile(model.blocks[i], backend="aot_eager")
    for block in model.blocks:
        pycoll.fully_shard(block)
    pycoll.fully_shard(model)
    around: Any = torch.compile(sharded_network(), backend="aot_eager")
    for number in range(2):
        losses = []
        for each in (plain, model, around):
            each.zero_grad()
            loss = loss_of(each(rows(number, rank)))
            loss.backward()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        assert losses[2] == pytest.approx(losses[0], rel=1e-5)
        for p, q, r in zip(
            plain.parameters(), model.parameters(), around.parameters(), strict=True
        ):
            for other in (q, r):
                assert torch.allclose(p.grad.full_tensor(), other.grad.full_tensor(), atol=1e-6)


def test_compiled_units(pool: Pools) -> None:
    pool(2).run(compiled)


# --- ways to run a model ---------------------------------------------------------------------------


class Result:
    """What pytree does not know."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Odd(nn.Module):
    """Changes its input in place, and returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, *, x: Tensor, extra: dict[str, Tensor]) -> Result:
        x.mul_(1.5)
        return Result(torch.tanh(self.layer(x + extra["shift"])) * self.scale)


class OddNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.odd, self.last = nn.Linear(WIDTH, WIDTH), Odd(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.odd(x=x + 0, extra={"shift": x}).x + x
        return self.last(x)


def odd_ways() -> None:
    rank = dist.get_rank()
    model: Any = OddNetwork()
    replicated = pycoll.DistributedDataParallel(OddNetwork())
    for layer in (model.odd, model.first, model.last):
        pycoll.fully_shard(layer)
    pycoll.fully_shard(model)

    def compare() -> None:
        for (name, p), q in zip(model.named_parameters(), replicated.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-6, msg=name)
        model.zero_grad()
        replicated.zero_grad()

    # Twice through one graph.
    for each in (model, replicated):
        loss = loss_of(each(rows(0, rank)))
        loss.backward(retain_graph=True)
        loss.backward()
    compare()
    # Two forwards, then their backwards in either order.
    for order in ((0, 1), (1, 0)):
        for each in (model, replicated):
            losses = [loss_of(each(rows(number, rank))) for number in (1, 2)]
            for index in order:
                losses[index].backward()
        compare()
    # A penalty on the gradient with respect to the input.
    for each in (model, replicated):
        x = rows(3, rank).requires_grad_()
        loss = loss_of(each(x))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
    compare()
    # Forwards that no backward follows, with and without grad.
    for each in (model, replicated):
        with torch.no_grad():
            each(rows(4, rank))
        each(rows(5, rank))
        loss_of(each(rows(6, rank))).backward()
    compare()


def test_odd_ways_to_run_a_model(pool: Pools) -> None:
    for world_size in (2, 3):
        pool(world_size).run(odd_ways)
