"""The wrappers on a GPU: what ranks train together, beside one process that has the whole batch."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from where import DEVICE, SIMULATES

import pycoll
from pycoll.parallel.comm_hooks import Int8State, quantised_hook
from pycoll.testing import run_ranks

STEPS, BATCH, FEATURES = 4, 6, 17
TIMEOUT = timedelta(seconds=15)
# Of sums in another order, and of gradients in 8 bits.
CLOSE, COARSE = 1e-4, 0.1


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, 301), nn.BatchNorm1d(301), nn.ReLU(), nn.Linear(301, 5))
    return nn.Sequential(*layers)


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(BATCH, FEATURES, generator=generator) + rank


def trained(quantised: bool) -> list[Tensor]:
    """Of this rank: parameters and buffers."""
    if not SIMULATES:
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = False
    converted = pycoll.SyncBatchNorm.convert_sync_batchnorm(model()).to(DEVICE)
    ids = None if SIMULATES else [0]
    ddp = pycoll.DistributedDataParallel(converted, device_ids=ids, bucket_cap_mb=0.01)
    if quantised:
        ddp.register_comm_hook(Int8State(), quantised_hook)
    optimizer = pycoll.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.05)
    for step in range(STEPS):
        ddp(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ddp.check_in_sync()
    return [tensor.detach().cpu() for tensor in ddp.module.state_dict().values()]


def alone(world_size: int) -> list[Tensor]:
    one = copy.deepcopy(model())
    optimizer = torch.optim.SGD(one.parameters(), lr=0.05)
    for step in range(STEPS):
        whole = torch.cat([batch(step, rank) for rank in range(world_size)])
        one(whole).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.detach() for tensor in one.state_dict().values()]


def both() -> tuple[list[Tensor], list[Tensor]]:
    return trained(False), trained(True)


def wrappers(world_size: str) -> dict[str, Any]:
    n = int(world_size)
    want = alone(n)
    ranks = run_ranks(both, n, pg_options=pycoll.Options(timeout=TIMEOUT), timeout=55)
    found, wrong = {}, []
    for way, name, tolerance in ((0, "plain", CLOSE), (1, "int8", COARSE)):
        found[name] = max(
            float((x.double() - y.double()).abs().max())
            for states in ranks
            for x, y in zip(states[way], want, strict=True)
        )
        if not found[name] < tolerance:
            wrong.append(f"{name}: {found[name]} away from one process with the whole batch")
    return {"largest_difference": found, "wrong": wrong}
