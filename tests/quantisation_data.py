"""Values that are hard to quantise; they depend on position and seed."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("random", "outlier", "alternating", "subnormal", "zero", "huge")


def hard_values(kind: str, numel: int, seed: int = 0) -> Tensor:
    """float32. "outlier": one element in 101 outweighs the others by 2**20; "huge": near the largest float."""
    generator = torch.Generator().manual_seed(seed * 1009 + numel)
    position = torch.arange(numel)
    x = torch.randn(numel, generator=generator)
    sign = torch.where(position % 2 == 0, 1.0, -1.0)
    if kind == "random":
        return torch.ldexp(x, position % 23 - 11)
    if kind == "outlier":
        return torch.where(position % 101 == 7, x * 2.0**20, x)
    if kind == "alternating":
        return sign * (1 + (position + seed) % 13 / 16)
    if kind == "subnormal":
        # 2**-149 times an integer: exact, and not flushed as a constant would be.
        return sign * (((position + 7 * seed) % 1009).to(torch.int32)).view(torch.float32)
    if kind == "zero":
        return sign * 0.0
    if kind == "huge":
        return sign * (torch.finfo(torch.float32).max / 4 - 2.0**105 * ((position + seed) % 7))
    raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
