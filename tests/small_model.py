"""A small model, its data, and what one process makes of it: the measure for wrappers that train it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

LEARNING_RATE = 1e-2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(13, 31), nn.GELU(), nn.Linear(31, 17), nn.GELU(), nn.Linear(17, 3)
    )


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, LEARNING_RATE)


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 13, generator=generator)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Every rank with batches of its own."""
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(step, dist.get_rank())).backward()
        optimizer.step()


def train_alone(world_size: int, steps: int) -> nn.Module:
    """One process with the batches of all ranks."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        x = torch.cat([batch(step, rank) for rank in range(world_size)])
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    return model


def assert_close_to_alone(parameters: Iterable[Tensor], steps: int) -> None:
    alone = train_alone(dist.get_world_size(), steps)
    for mine, expected in zip(parameters, alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), expected.detach(), rtol=1e-4, atol=1e-5)


def equal_on_all_ranks(tensors: Iterable[Tensor]) -> bool:
    """Bit for bit."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(flat, other) for other in everyone)
