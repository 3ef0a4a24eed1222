"""Sharded models in programs that do more than plain steps: failing passes, results on other ways, calls by hand."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_fsdp import WIDTH, Block, Network, loss_of, rows
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

import pycoll
from pycoll.parallel.fsdp.schedule import state_of
from pycoll.testing import RankPool

pytestmark = pytest.mark.slow

Pools = Callable[[int], RankPool]


def three_layers() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def sharded(model: nn.Module, units: Any = (), mesh: Any = None) -> Any:
    for unit in units:
        pycoll.fully_shard(unit, mesh)
    return pycoll.fully_shard(model, mesh)


def assert_gradients(model: nn.Module, alone: nn.Module) -> None:
    """`alone` has seen the rows of all ranks, one after the other: sums instead of means."""
    n = dist.get_world_size()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert p.grad is not None, name
        assert torch.allclose(p.grad.full_tensor() * n, q.grad, rtol=1e-4, atol=1e-5), name


def backward_alone(model: nn.Module, number: int) -> None:
    for rank in range(dist.get_world_size()):
        loss_of(model(rows(number, rank))).backward()


# --- failing passes --------------------------------------------------------------------------------


class BrokenError(RuntimeError):
    pass


@contextmanager
def breaks_backward(module: nn.Module) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise BrokenError

    handle = module.register_full_backward_pre_hook(fail)
    with pytest.raises(BrokenError):
        yield
    handle.remove()


def accumulates_and_fails(hybrid: bool) -> None:
    """What earlier passes have accumulated goes with the pass that fails, in all units alike."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2)) if hybrid else None
    alone, model = three_layers(), three_layers()
    sharded(model, model, mesh)
    without = model.set_requires_all_reduce if hybrid else model.set_requires_gradient_sync
    for last in (0, 1):
        model.zero_grad()
        alone.zero_grad()
        without(False)
        loss_of(model(rows(1, rank))).backward()
        without(True)
        with breaks_backward(model[last]):
            loss_of(model(rows(2, rank))).backward()
        loss_of(model(rows(3, rank))).backward()
        backward_alone(alone, 3)
        assert_gradients(model, alone)


def changes_parts_after_a_failing_forward() -> None:
    """Units that the failed forward left whole are gathered anew."""
    alone, model = three_layers(), three_layers()
    sharded(model, model)
    parts = list(model.parameters())

    def fail(*_: Any) -> None:
        raise BrokenError

    for failing in model:
        handle = failing.register_forward_pre_hook(fail)
        with pytest.raises(BrokenError):
            model(rows(1, 0))
        handle.remove()
        with torch.no_grad():
            for p, q in zip(parts, alone.parameters(), strict=True):
                p.mul_(-0.5)
                q.mul_(-0.5)
        assert torch.allclose(model(rows(1, 0)), alone(rows(1, 0)), rtol=1e-5, atol=1e-6)


def test_failing_passes(pool: Pools) -> None:
    pool(2).run(changes_parts_after_a_failing_forward)
    pool(2).run(accumulates_and_fails, False)
    pool(4).run(accumulates_and_fails, True)


def freezes_too_early() -> None:
    model = three_layers()
    sharded(model, model, init_device_mesh("cpu", (2, 2)))
    model.set_requires_all_reduce(False)
    loss_of(model(rows(1, dist.get_rank()))).backward()
    model[0].weight.requires_grad_(False)
    model.set_requires_all_reduce(True)
    with pytest.raises(dist.DistBackendError, match="freeze and unfreeze parameters only after"):
        loss_of(model(rows(2, dist.get_rank()))).backward()


def test_freezing_between_partial_reductions(pool: Pools) -> None:
    pool(4).run(freezes_too_early)
    pool(4).kill()


# --- results that take another way -----------------------------------------------------------------


class Stores(nn.Module):
    """Leaves its result where nobody looks."""

    def __init__(self, slots: bool) -> None:
        super().__init__()
        self.layers, self.slots = three_layers(), slots

    def forward(self, x: Tensor) -> Any:
        self.result = self.layers[2](self.layers[1](self.layers[0](x)))
        return (lambda result=self.result: result) if self.slots else None


def hides_results(slots: bool) -> None:
    rank = dist.get_rank()
    alone, model = Stores(slots), Stores(slots)
    sharded(model, [model.layers[1]])
    for number in range(2):
        model(rows(number, rank))
        loss_of(model.result).backward()
        for each in range(dist.get_world_size()):
            alone(rows(number, each))
            loss_of(alone.result).backward()
        assert_gradients(model, alone)
        assert isinstance(model.layers[0].weight, DTensor)


def test_hidden_results(pool: Pools) -> None:
    pool(2).run(hides_results, False)
    pool(2).run(hides_results, True)


class Chooses(nn.Module):
    """Rank 0 uses a layer more than the others; nobody uses the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = three_layers()

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if rank == 0 else x


def chooses_layers() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    alone, model = Chooses(), sharded(Chooses())
    for number in range(2):  # the second time gradients are added
        loss_of(model(rows(number, rank), rank)).backward()
        for each in range(n):
            loss_of(alone(rows(number, each), each)).backward()
        for layer, right in zip(model.layers[:2], alone.layers, strict=False):
            grad = layer.weight.grad.full_tensor() * n
            assert torch.allclose(grad, right.weight.grad, rtol=1e-4, atol=1e-5)
        assert model.layers[2].weight.grad is None


def test_layers_that_some_ranks_use(pool: Pools) -> None:
    pool(2).run(chooses_layers)
    pool(3).run(chooses_layers)


class Recurses(nn.Module):
    """Calls itself, and uses its weight before and after."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.one(x).tanh()
        if depth:
            x = self(x, depth - 1)
        return self.two(x).tanh()


def recurses() -> None:
    rank = dist.get_rank()
    alone, model = nn.Sequential(Recurses()), nn.Sequential(Recurses())
    sharded(model, model)
    for number in range(2):
        loss_of(model(rows(number, rank))).backward()
        backward_alone(alone, number)
        assert_gradients(model, alone)


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = three_layers()

    def encode(self, x: Tensor) -> Tensor:
        return self.layers(x)


def calls_another_method() -> None:
    rank = dist.get_rank()
    alone, model = Encodes(), Encodes()
    sharded(model)
    pycoll.register_fsdp_forward_method(model, "encode")
    pycoll.register_fsdp_forward_method(alone, "encode")
    with pytest.raises(AttributeError, match="decode"):
        pycoll.register_fsdp_forward_method(model, "decode")
    for number in range(2):
        loss_of(model.encode(rows(number, rank))).backward()
        for each in range(dist.get_world_size()):
            loss_of(alone.encode(rows(number, each))).backward()
        assert_gradients(model, alone)


def test_calls_of_other_kinds(pool: Pools) -> None:
    pool(2).run(recurses)
    pool(2).run(calls_another_method)


# --- by hand ---------------------------------------------------------------------------------------


def unshards_by_hand() -> None:
    rank = dist.get_rank()
    alone, model = three_layers(), three_layers()
    sharded(model, model)
    for number in range(2):
        model.unshard()
        model[1].unshard()
        assert torch.equal(model[1].weight, alone[1].weight)
        loss_of(model(rows(number, rank))).backward()
        backward_alone(alone, number)
        assert_gradients(model, alone)
        assert all(isinstance(p, DTensor) for p in model.parameters())


def infers_first() -> None:
    rank = dist.get_rank()
    with torch.device("meta"):
        model = three_layers()
    alone = three_layers()
    sharded(model, model)
    model.to_empty(device="cpu")
    pycoll.load_full_state_dict(model, alone.state_dict())
    with torch.inference_mode():
        assert torch.allclose(model(rows(0, 0)), alone(rows(0, 0)))
    loss_of(model(rows(1, rank))).backward()
    backward_alone(alone, 1)
    assert_gradients(model, alone)


def saves_parts() -> None:
    """Parts and gradients go through torch.save and deepcopy, and take only their own bytes."""
    model = sharded(three_layers())
    loss_of(model(rows(1, dist.get_rank()))).backward()
    grads = [p.grad for p in model.parameters()]
    for tensors in (list(model.state_dict().values()), grads):
        file = io.BytesIO()
        torch.save(tensors, file)
        file.seek(0)
        with torch.serialization.safe_globals([DTensor]):
            loaded = torch.load(file, weights_only=False)
        for tensor, got, copied in zip(tensors, loaded, copy.deepcopy(tensors), strict=True):
            assert torch.equal(tensor.to_local(), got.to_local())
            assert torch.equal(tensor.to_local(), copied.to_local())
    one = io.BytesIO()
    torch.save(model[0].bias.detach(), one)
    assert len(one.getvalue()) < 4096


def test_by_hand(pool: Pools) -> None:
    pool(2).run(unshards_by_hand)
    pool(2).run(infers_first)
    pool(2).run(saves_parts)


# --- the front -------------------------------------------------------------------------------------


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = pycoll.FullyShardedDataParallel(Network(), auto_wrap_policy={Block})

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def front_in_a_module() -> None:
    """State dicts have the model's own names, and load."""
    model, names = Holds(), list(Network().state_dict())
    assert list(model.state_dict()) == [f"inner.{name}" for name in names]
    own = [name for name, _ in Network().named_parameters()]
    assert [name for name, _ in model.inner.named_parameters()] == own
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model(rows(1, 0))).backward()
    optimizer.step()
    model.load_state_dict(saved)
    for name, value in model.state_dict().items():
        assert torch.equal(value.to_local(), saved[name].to_local())
    assert model.inner.blocks is model.inner.module.blocks
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.inner.nothing
    fronts = [pycoll.FullyShardedDataParallel(Network()) for _ in range(2)]
    optimizers = [torch.optim.AdamW(front.parameters(), lr=0.1) for front in fronts]
    loss_of(fronts[0](rows(1, 0))).backward()
    optimizers[0].step()
    weights, states = get_state_dict(fronts[0].module, optimizers[0])
    assert sorted(weights) == sorted(names)
    how = {"model_state_dict": weights, "optim_state_dict": states}
    set_state_dict(fronts[1].module, optimizers[1], **how)
    for p, q in zip(*(front.parameters() for front in fronts), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
        moments = [o.state[x]["exp_avg"] for o, x in zip(optimizers, (p, q), strict=True)]
        assert torch.equal(*(each.to_local() for each in moments))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.attention, self.out = nn.MultiheadAttention(12, 3), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x)[0])


def chooses_by_size() -> None:
    """torch's policy does not look into attention, whose parts do not run by themselves."""
    alone = Attends()
    front = pycoll.FullyShardedDataParallel(
        Attends(),
        auto_wrap_policy=lambda **how: size_based_auto_wrap_policy(min_num_params=100, **how),
    )
    units = [name for name, m in front.module.named_modules() if state_of(m) is not None]
    assert units == ["", "attention", "out"]
    x = torch.arange(60.0).view(5, 12) / 60
    assert torch.allclose(front(x), alone(x), atol=1e-6)


def wraps_what_is_sharded() -> None:
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is a DTensor"):
        pycoll.DistributedDataParallel(sharded(three_layers()))
    with pytest.raises(ValueError, match="shard inner modules before"):
        sharded(sharded(three_layers())[0])


def test_the_front_in_programs(pool: Pools) -> None:
    pool(2).run(front_in_a_module)
    pool(2).run(chooses_by_size)
    pool(2).run(wraps_what_is_sharded)
