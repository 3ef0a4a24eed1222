"""Float32 numbers as bytes with a scale a block, and back. Plain torch operations; nothing of ranks here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockFormat:
    """One byte an element and one float32 scale a block of `block_numel` elements.

    Attributes:
        dtype: of the bytes.
        largest: what the largest magnitude of a block becomes.
        block_numel: elements that share a scale.

    With m the largest magnitude of an element's block, an element is off by at most m/254 in int8, and by at
    most 1/16 of itself (m/229,376 near zero) in float8_e4m3fn.
    """

    dtype: torch.dtype
    largest: float
    block_numel: int

    def __post_init__(self) -> None:
        if self.block_numel < 1:
            raise ValueError(f"block_numel must be positive, got {self.block_numel}")


INT8 = BlockFormat(torch.int8, 127.0, 256)
FP8 = BlockFormat(torch.float8_e4m3fn, 448.0, 256)


def row_nbytes(numel: int, block: BlockFormat) -> int:
    """Bytes of `numel` encoded elements, a multiple of the block."""
    return numel + numel // block.block_numel * 4


def encode(values: Tensor, block: BlockFormat) -> Tensor:
    """(rows, numel) float32, numel a multiple of the block, to (rows, `row_nbytes`) uint8: elements, then scales.

    A block with an infinity or a NaN comes back as NaN.
    """
    blocks = values.view(values.shape[0], -1, block.block_numel)
    scales = blocks.abs().amax(dim=2, keepdim=True) / block.largest
    # Of a block of zeros, and of one so small that its scale has no inverse.
    scaled = torch.where(scales > 0, blocks / scales, torch.zeros(()))
    if block.dtype is torch.int8:
        scaled = scaled.round()
    elements = torch.nan_to_num(scaled).clamp(-block.largest, block.largest).to(block.dtype)
    parts = (
        elements.flatten(1).view(torch.uint8),
        scales.flatten(1).contiguous().view(torch.uint8),
    )
    return torch.cat(parts, dim=1)


def decode(rows: Tensor, block: BlockFormat) -> Tensor:
    """The inverse of `encode`, but for the rounding: (rows, numel) float32."""
    numel = rows.shape[1] * block.block_numel // (block.block_numel + 4)
    elements = rows[:, :numel].contiguous().view(block.dtype).to(torch.float32)
    scales = rows[:, numel:].contiguous().view(torch.float32)
    blocks = elements.view(rows.shape[0], -1, block.block_numel)
    return (blocks * scales.unsqueeze(2)).view(rows.shape[0], numel)
