"""Inputs that went wrong elsewhere, and the right values: fully sharded models (C51 to C57)."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import pycoll
from pycoll.testing import RankPool

pytestmark = pytest.mark.slow

Pools = Callable[[int], RankPool]
BF16, FP32 = torch.bfloat16, torch.float32


class Parameters(nn.Module):
    """Loss: the sum of all parameters, each times a factor, times an input."""

    def __init__(self, factors: dict[str, float], **values: Tensor) -> None:
        super().__init__()
        self.factors = factors
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, k: Tensor) -> Tensor:
        total = torch.zeros(())
        for name, factor in self.factors.items():
            total = total + (getattr(self, name) * k * factor).sum()
        return total


def scalar(value: float) -> Tensor:
    return torch.full((), float(value))


def hybrid_mesh() -> Any:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2))


# --- C51 -------------------------------------------------------------------------------------------


def uneven(**more: Tensor) -> Parameters:
    return Parameters(
        {"w": 1.0, "v": 10.0}, w=torch.zeros(5), v=torch.zeros(1, 2), e=torch.zeros(0, 4), **more
    )


def uneven_shards() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    with pytest.raises(ValueError, match=r"parameter 's' has no dims"):
        pycoll.fully_shard(uneven(s=torch.zeros(())))
    with_s = uneven(s=torch.zeros(()))
    pycoll.fully_shard(with_s, ignored_params=[with_s.s])
    model = pycoll.fully_shard(uneven())
    shapes: list[Any] = [None] * n
    mine = {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}
    dist.all_gather_object(shapes, mine)
    for name, whole in (("w", 5), ("v", 1), ("e", 0)):
        assert sum(shape[name][0] for shape in shapes) == whole
        assert all(shape[name][1:] == mine[name][1:] for shape in shapes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    model(scalar(rank + 1)).backward()
    k = (n + 1) / 2
    assert torch.equal(model.w.grad.full_tensor(), torch.full((5,), k))
    assert torch.equal(model.v.grad.full_tensor(), torch.full((1, 2), 10 * k))
    optimizer.step()
    torch.testing.assert_close(model.w.full_tensor().detach(), torch.full((5,), -0.1))


def test_c51_uneven_and_empty_shards(pool: Pools) -> None:
    for n in (2, 3):
        pool(n).run(uneven_shards)


# --- C52 -------------------------------------------------------------------------------------------


def norms(hybrid: bool) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = hybrid_mesh() if hybrid else None
    model = pycoll.fully_shard(uneven(), mesh)
    k = (n + 1) / 2
    values = [k] * 5 + [10 * k] * 2
    for p in (1.0, 2.0, math.inf, 0.5):
        model.zero_grad()
        model(scalar(rank + 1)).backward()
        norm = pycoll.clip_grad_norm_(model.parameters(), 1.0, p)
        right = max(values) if p == math.inf else sum(v**p for v in values) ** (1 / p)
        assert norm.item() == pytest.approx(right, rel=1e-6)
        w, v = model.w.grad.full_tensor(), model.v.grad.full_tensor()
        assert w[0].item() == pytest.approx(k / right, rel=1e-5)
        assert v[0, 1].item() == pytest.approx(10 * k / right, rel=1e-5)
    # A rank without gradients, and a NaN that one rank has.
    if rank == 1:
        model.w.grad = model.v.grad = None
    partial = pycoll.clip_grad_norm_(model.parameters(), 1e9).item()
    if n == 2:
        everyone = [0.0] * n
        dist.all_gather_object(everyone, partial)
        assert len(set(everyone)) == 1
    model(scalar(rank + 1)).backward()
    if rank == 0:
        model.w.grad.to_local()[0] = math.nan
    with pytest.raises(RuntimeError, match=r"total norm of order 2.0 of the gradients is nan"):
        pycoll.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    for p in (2.0, math.inf):
        assert pycoll.clip_grad_norm_(model.parameters(), 1.0, p).isnan()


def test_c52_norms_over_shards(pool: Pools) -> None:
    assert math.sqrt(5 * 1.5**2 + 2 * 15**2) == pytest.approx(21.4767, abs=1e-4)
    for n in (2, 3):
        pool(n).run(norms, False)
    pool(4).run(norms, True)


# --- C53 -------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self, seed: int, device: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(7, 3, device=device))
        self.register_buffer("kept", torch.randn(5, device=device))
        self.register_buffer("inv_freq", torch.randn(11, device=device), persistent=False)
        self.register_buffer("count", torch.randint(9, (3,), device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum() + self.inv_freq.sum()


class Outer(nn.Module):
    def __init__(self, seed: int, device: str) -> None:
        super().__init__()
        self.inner = Inner(seed, device)
        self.left_alone = Inner(seed + 100, "cpu")
        self.scale = nn.Parameter(torch.full((2,), float(seed), device=device))
        self.register_buffer(
            "offset", torch.full((3,), seed + 0.5, device=device), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.left_alone(self.inner(x)) * self.scale.sum() + self.offset.sum()


def from_rank_0(hybrid: bool) -> None:
    rank = dist.get_rank()
    mesh = hybrid_mesh() if hybrid else None
    model, right = Outer(rank, "cpu" if rank == 0 else "meta"), Outer(0, "cpu")
    left_alone = {name: t.clone() for name, t in model.left_alone.state_dict().items()}
    ignored = list(model.left_alone.parameters())
    policy = pycoll.MixedPrecisionPolicy(BF16)
    how: Any = {"sync_module_states": True, "mp_policy": policy, "ignored_params": ignored}
    pycoll.fully_shard(model.inner, mesh, **how)
    pycoll.fully_shard(model, mesh, **how)
    for part, whole in ((model.inner, right.inner), (model, right)):
        for name, buffer in part.named_buffers(recurse=False):
            expected = dict(whole.named_buffers(recurse=False))[name]
            assert buffer.dtype == expected.dtype
            assert torch.equal(buffer, expected), name
    assert torch.equal(model.inner.weight.full_tensor(), right.inner.weight)
    assert torch.equal(model.scale.full_tensor(), right.scale)
    for name, tensor in model.left_alone.named_parameters():
        assert torch.equal(tensor, left_alone[name])
    model(torch.ones(1)).sum().backward()


def meta_to_memory() -> None:
    rank = dist.get_rank()
    model, right = Outer(0, "meta"), Outer(0, "cpu")
    pycoll.fully_shard(model.inner)
    pycoll.fully_shard(model)
    with pytest.raises(
        RuntimeError, match=r"parameter 'scale' of 'Outer#\d+' is still on the meta device"
    ):
        model(torch.ones(1))
    model.to_empty(device="cpu")
    for t in (*model.parameters(), *model.buffers()):
        local = t.to_local() if hasattr(t, "to_local") else t
        if local.is_floating_point():
            local.detach().fill_(math.nan)
    pycoll.load_full_state_dict(model, right.state_dict() if rank == 0 else {}, from_rank0=True)
    for name, value in pycoll.full_state_dict(model).items():
        assert torch.equal(value, right.state_dict()[name]), name


def test_c53_buffers_when_only_rank_0_has_the_model(pool: Pools) -> None:
    pool(2).run(from_rank_0, False)
    pool(4).run(from_rank_0, True)
    for n in (1, 2, 3):
        pool(n).run(meta_to_memory)


# --- C54 -------------------------------------------------------------------------------------------


def accumulates(offload: bool, reshard: bool, synced: list[bool]) -> float:
    rank = dist.get_rank()
    policy = pycoll.CPUOffloadPolicy() if offload else None
    model = Parameters({"w": 1.0}, w=torch.zeros(3))
    pycoll.fully_shard(model, reshard_after_forward=reshard, offload_policy=policy)
    for k, syncs in zip((1, 2, 4), synced, strict=True):
        model.set_requires_gradient_sync(syncs)
        model(scalar(k * (rank + 1))).backward()
    values = model.w.grad.full_tensor()
    assert len(set(values.tolist())) == 1
    return float(values[0])


def test_c54_accumulation(pool: Pools) -> None:
    for offload in (False, True):
        for reshard in (False, True):
            for synced in ([True] * 3, [False, False, True], [False, True, True]):
                assert pool(2).run(accumulates, offload, reshard, synced) == [10.5, 10.5]


# --- C55 -------------------------------------------------------------------------------------------


def frozen_and_not() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    model = Parameters({"w": 1.0, "v": 10.0}, w=torch.zeros(5), v=torch.zeros(3))
    model.w.requires_grad_(False)
    pycoll.fully_shard(model)
    mean = (n + 1) / 2
    for step in range(5):
        if step == 3:
            model.w.requires_grad_(True)
        model.zero_grad()
        model(scalar(rank + 1)).backward()
        assert torch.equal(model.v.grad.full_tensor(), torch.full((3,), 10 * mean))
        if step < 3:
            assert model.w.grad is None
        else:
            assert torch.equal(model.w.grad.full_tensor(), torch.full((5,), mean))


def unfrozen_reduces_in_float32() -> float:
    """256 and 1 are exact in bfloat16, their sum is not."""
    rank = dist.get_rank()
    model = Parameters({"w": 1.0}, w=torch.zeros(3))
    model.w.requires_grad_(False)
    pycoll.fully_shard(model, mp_policy=pycoll.MixedPrecisionPolicy(BF16, FP32))
    assert not model(scalar(1)).requires_grad
    assert hasattr(
        model.w, "placements"
    )  # a part: nothing stays whole that no backward pass releases
    model.w.requires_grad_(True)
    model(scalar(256 if rank == 0 else 1)).backward()
    assert model.w.grad.dtype == FP32
    return float(model.w.grad.full_tensor()[0])


def adapters() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(97, 97), nn.Linear(97, 1, bias=False), nn.Linear(1, 97))
    for p in model[0].parameters():
        p.requires_grad_(False)
    import copy

    alone = copy.deepcopy(model)
    for layer in model:
        pycoll.fully_shard(layer)
    pycoll.fully_shard(model)
    rows = [torch.randn(3, 97, generator=torch.Generator().manual_seed(r)) for r in range(n)]
    model(rows[rank]).square().mean().backward()
    alone(torch.cat(rows)).square().mean().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-6)


def test_c55_frozen_and_unfrozen(pool: Pools) -> None:
    for n in (2, 3):
        pool(n).run(frozen_and_not)
        pool(n).run(adapters)
    assert pool(2).run(unfrozen_reduces_in_float32) == [128.5, 128.5]


# --- C56 -------------------------------------------------------------------------------------------


def used_late() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    values = {name: torch.zeros(3) for name in ("p0", "p1", "p2")}
    model = Parameters({"p0": 1.0}, **values)
    pycoll.fully_shard(model, mp_policy=pycoll.MixedPrecisionPolicy(BF16, FP32))
    model.set_requires_gradient_sync(False)
    model(scalar(256 * (rank + 1))).backward()
    model.factors["p1"] = 1.0
    model.set_requires_gradient_sync(True)
    model(scalar(1)).backward()
    assert torch.equal(model.p0.grad.full_tensor(), torch.full((3,), 128.0 * (n + 1) + 1))
    assert torch.equal(model.p1.grad.full_tensor(), torch.ones(3))
    assert model.p2.grad is None
    assert model.p1.grad.dtype == FP32


def master_weights() -> float:
    model = Parameters({"w": 1.0}, w=torch.ones(2))
    pycoll.fully_shard(model, mp_policy=pycoll.MixedPrecisionPolicy(BF16, FP32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seen = set()
    for _ in range(1000):
        optimizer.zero_grad()
        model.register_forward_pre_hook(lambda m, a: seen.add(m.w.dtype)) if not seen else None
        model(scalar(1)).backward()
        optimizer.step()
    assert seen == {BF16}
    return float(model.w.full_tensor()[0])


def test_c56_master_weights_and_mixed_dtypes(pool: Pools) -> None:
    for n in (1, 2):
        pool(n).run(used_late)
        assert pool(n).run(master_weights) == [pytest.approx(0.9, abs=1e-3)] * n


# --- C57 -------------------------------------------------------------------------------------------


def state_dicts() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    right = {name: value.clone() for name, value in plain.state_dict().items()}
    pycoll.fully_shard(plain[0])
    model = pycoll.fully_shard(plain)
    model(torch.ones(4, 5)).sum().backward()  # gradients are outstanding
    right.update({n: v.clone() for n, v in model.state_dict().items() if n.startswith("1.running")})
    right["1.num_batches_tracked"] += 1
    for _ in range(2):
        everyone = pycoll.full_state_dict(model)
        first = pycoll.full_state_dict(model, rank0_only=True)
        assert (first == {}) == (rank != 0)
        for found in (everyone, first) if rank == 0 else (everyone,):
            assert list(found) == list(right)
            for name, value in right.items():
                assert torch.equal(found[name], value), name
    assert all("_" not in name.split(".")[0] for name in model.state_dict())
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"full_state_dict is collective: .*[Rr]anks? 1"):
            pycoll.full_state_dict(model, timeout=timedelta(seconds=1))
    dist.barrier()
    wrong = dict(right)
    del wrong["0.bias"]
    with pytest.raises(ValueError, match=r"lacks \['0.bias'\]"):
        pycoll.load_full_state_dict(model, wrong if rank == 0 else {}, from_rank0=True)
    wrong["0.bias"] = torch.ones(4)
    with pytest.raises(ValueError, match=r"'0.bias' has shape \(4,\) in the state dict and \(3,\)"):
        pycoll.load_full_state_dict(model, wrong)


def test_c57_state_dicts(pool: Pools) -> None:
    pool(2).run(state_dicts)
