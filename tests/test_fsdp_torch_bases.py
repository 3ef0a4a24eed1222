"""The models and the comparison that torch ships for its own tests of FSDP, with pycoll's wrapper."""

from __future__ import annotations

import copy
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import pycoll
from pycoll.testing import RankPool

pytest.importorskip("expecttest", reason="torch's bases need it")

pytestmark = pytest.mark.slow

Pools = Callable[[int], RankPool]


def models() -> dict[str, tuple[nn.Module, list[str], Callable[[int], Any]]]:
    """Name to model, names of its units, and its inputs of a rank."""
    from torch.testing._internal.common_fsdp import DoubleLinear, MLPStack, SkipModel
    from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

    def floats(*shape: int) -> Callable[[int], Any]:
        return lambda seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    def tokens(seed: int) -> Any:
        return torch.randint(0, 8, (2, 16), generator=torch.Generator().manual_seed(seed))

    torch.manual_seed(42)
    arguments = ModelArgs(n_layers=2, dropout_p=0.0, checkpoint_activations=True)
    return {
        "MLPStack": (MLPStack(16), ["0", "1", "2"], floats(3, 16)),
        "DoubleLinear": (DoubleLinear(8), ["lin1"], floats(3, 8)),
        "SkipModel": (SkipModel(double_nest=True), ["linear"], floats(3, 10)),
        "Transformer": (Transformer(arguments), ["layers.0", "layers.1"], tokens),
    }


class Case(unittest.TestCase):
    """Compares tensors as far as rounding allows."""

    def assertEqual(self, first: Any, second: Any, msg: Any = None) -> None:  # noqa: N802 torch's call
        if isinstance(first, torch.Tensor):
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
        else:
            assert first == second, msg


def trains_like_torchs_reference(hybrid: bool, reshard: bool) -> None:
    from torch.testing._internal.common_fsdp import check_sharded_parity

    case, rank, n = Case(), dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, n // 2) if hybrid else (n,))
    for model, units, inputs in models().values():
        reference = copy.deepcopy(model)
        for name in units:
            pycoll.fully_shard(model.get_submodule(name), mesh, reshard_after_forward=reshard)
        pycoll.fully_shard(model, mesh, reshard_after_forward=reshard)
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, reference)]
        for number in range(3):
            losses = []
            for each, optimizer in zip((model, reference), optimizers, strict=True):
                optimizer.zero_grad()
                output = each(inputs(n * number + rank + 1))
                loss = (output[0] if isinstance(output, tuple) else output).square().mean()
                loss.backward()
                losses.append(loss.item())
            for p in reference.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad, dist.ReduceOp.AVG)
            assert losses[0] == pytest.approx(losses[1], rel=1e-4)
            check_sharded_parity(case, reference, model)
            for optimizer in optimizers:
                optimizer.step()


def test_models_of_torchs_bases(pool: Pools) -> None:
    pool(2).run(trains_like_torchs_reference, False, True)
    pool(3).run(trains_like_torchs_reference, False, False)
    pool(4).run(trains_like_torchs_reference, True, True)
