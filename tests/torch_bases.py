"""Tests on the bases that torch ships for its own: run as a program, by `test_torch_suite`.

Each base starts ranks in its own way; what is tested is that they start, agree and end over pycoll.
The names that the bases look up are changed here, in a process of its own.
"""

# ruff: noqa: PT009, torch's bases compare tensors with assertEqual
from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.testing._internal.common_fsdp as common_fsdp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_fsdp import MLP, FSDPTest, check_sharded_parity
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

BACKEND = "pycoll"
common_fsdp.DISTRIBUTED_BACKEND = BACKEND  # looked up when a rank starts
torch.accelerator.device_count = lambda: 8  # fewer devices than ranks would skip every test


class FullyShardTest(FSDPTest):
    @property
    def world_size(self) -> int:
        return 2

    def _models(self, **how: object) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(42)
        alone = nn.Sequential(*[MLP(8) for _ in range(3)])
        sharded = copy.deepcopy(alone)
        for layer in sharded:
            fully_shard(layer, **how)
        fully_shard(sharded, **how)
        return alone, sharded

    def _train(self, alone: nn.Module, sharded: nn.Module) -> None:
        """Both on this rank's data; the gradients of one are averaged by hand."""
        optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (alone, sharded)]
        torch.manual_seed(42 + self.rank)
        for _ in range(4):
            x = torch.randn(4, 8)
            for model in (alone, sharded):
                model(x).sum().backward()
            for p in alone.parameters():
                dist.all_reduce(p.grad, dist.ReduceOp.AVG)
            check_sharded_parity(self, alone, sharded)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            check_sharded_parity(self, alone, sharded)

    def test_parity(self) -> None:
        """One test for all: every test starts its ranks anew, which takes longer than all of these."""
        self.assertEqual(dist.get_backend(), BACKEND)
        self._train(*self._models())
        self._train(*self._models(reshard_after_forward=False))
        self._train(*self._models(offload_policy=CPUOffloadPolicy(pin_memory=False)))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        _, sharded = self._models(mp_policy=policy)
        sharded(torch.ones(4, 8)).sum().backward()
        for p in sharded.parameters():
            gradient = p.grad.full_tensor()
            others = [torch.empty_like(gradient) for _ in range(self.world_size)]
            dist.all_gather(others, gradient)
            self.assertEqual(others[0], others[1])


class ContinuousTest(MultiProcContinuousTest):
    world_size = 3

    @classmethod
    def backend_str(cls) -> str:
        return BACKEND

    def test_sum(self) -> None:
        x = torch.arange(5.0) + self.rank
        dist.all_reduce(x)
        self.assertEqual(x, 3 * torch.arange(5.0) + 3)

    def test_exchange(self) -> None:
        x = torch.arange(3.0) + 10 * self.rank
        y = torch.empty(3)
        dist.all_to_all_single(y, x)
        self.assertEqual(y, torch.arange(3.0) * 10 + self.rank)


class PlacementTest(DTensorTestBase):
    @property
    def world_size(self) -> int:
        return 3

    def init_pg(self, *_: object, **__: object) -> None:
        dist.init_process_group(
            BACKEND,
            rank=self.rank,
            world_size=self.world_size,
            init_method=f"file://{self.file_name}",
        )

    @with_comms
    def test_placements(self) -> None:
        self.assertEqual(dist.get_backend(), BACKEND)
        mesh = self.build_device_mesh()
        whole = torch.arange(26.0).reshape(13, 2)
        for placement in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(whole, mesh, [placement])
            self.assertEqual(tensor.full_tensor(), whole)
            self.assertEqual(tensor.sum(0).full_tensor(), whole.sum(0))


if __name__ == "__main__":
    run_tests()
