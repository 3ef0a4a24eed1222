"""Trains a small convolutional network on scikit-learn's handwritten digits, one process a rank.

    pip install scikit-learn
    torchrun --nproc-per-node 2 -m pycoll.examples.train_cnn --epochs 5

Batch statistics are those of all ranks together (SyncBatchNorm), gradients are averaged (DistributedDataParallel), and
evaluation is divided among the ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import pycoll

TEST_SHARE = 5  # every fifth image


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 8, 8) float32 in 0..1 and their labels (N,) int64."""

    images: Tensor
    labels: Tensor

    def part(self, rank: int, world_size: int) -> Digits:
        """Every world_size-th image from `rank` on; ranks may have one more or less."""
        return Digits(self.images[rank::world_size], self.labels[rank::world_size])


def load_digits() -> tuple[Digits, Digits]:
    """1,797 scans of handwritten digits [1], for training and for testing.

    [1] E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.

    Raises:
        SystemExit: scikit-learn, which has them, is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise SystemExit(
            "train_cnn: error: scikit-learn has the data and is not installed: pip install scikit-learn"
        ) from None
    found = datasets.load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target, dtype=torch.int64)
    is_test = torch.arange(len(labels)) % TEST_SHARE == 0
    return Digits(images[~is_test], labels[~is_test]), Digits(images[is_test], labels[is_test])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """Of all ranks' parts together. Collective."""
    model.eval()
    right = (model(data.images).argmax(dim=1) == data.labels).sum()
    model.train()
    counts = torch.tensor([int(right), len(data.labels)])
    pycoll.all_reduce(counts)
    return int(counts[0]) / int(counts[1])


def train(epochs: int, batch_size: int, learning_rate: float) -> list[float]:
    """Returns the accuracy on test images before training and after each epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training, test = (data.part(rank, world_size) for data in load_digits())
    torch.manual_seed(0)
    model = pycoll.SyncBatchNorm.convert_sync_batchnorm(make_model())
    ddp = pycoll.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=learning_rate, momentum=0.9)
    seen = [accuracy(model, test)]
    for epoch in range(epochs):
        order = torch.randperm(
            len(training.labels), generator=torch.Generator().manual_seed(epoch * world_size + rank)
        )
        # Batch norm waits for all ranks, so all have equally many batches; their last ones differ in size.
        for rows in order.tensor_split(-(-len(order) * world_size // batch_size)):
            optimizer.zero_grad()
            F.cross_entropy(ddp(training.images[rows]), training.labels[rows]).backward()
            optimizer.step()
        seen.append(accuracy(model, test))
        if rank == 0:
            print(f"epoch {epoch + 1}/{epochs}: {seen[-1]:.1%} of test images right", flush=True)
    ddp.check_in_sync()
    return seen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="train_cnn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, all ranks")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    arguments = parser.parse_args(argv)
    if min(arguments.epochs, arguments.batch_size) < 1:
        parser.error("--epochs and --batch-size must be positive")
    load_digits()  # says at once if it cannot
    torch.set_num_threads(1)
    dist.init_process_group("pycoll")
    try:
        train(arguments.epochs, arguments.batch_size, arguments.learning_rate)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
