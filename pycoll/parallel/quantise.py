"""Float32 numbers as rows of bytes: codes under a scale a block, then scales (docs/quantisation.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pycoll import ops


@dataclass(frozen=True)
class BlockFormat:
    """One byte an element and one float32 scale a block of `block_numel` elements.

    Attributes:
        dtype: of the codes: int8, float8_e4m3fn or float8_e5m2.
        block_numel: elements that share a scale.
    """

    dtype: torch.dtype
    block_numel: int

    def __post_init__(self) -> None:
        if self.block_numel < 1:
            raise ValueError(f"block_numel must be positive, got {self.block_numel}")


INT8 = BlockFormat(torch.int8, 256)
FP8 = BlockFormat(torch.float8_e4m3fn, 256)


def row_nbytes(numel: int, block: BlockFormat) -> int:
    """Bytes of `numel` encoded elements, a multiple of the block."""
    return numel + numel // block.block_numel * 4


def encode(values: Tensor, block: BlockFormat) -> Tensor:
    """(rows, numel) float32, numel a multiple of the block, to (rows, `row_nbytes`) uint8.

    A block with an infinity or a NaN comes back as NaN.
    """
    codes, scales = ops.quantise_blocks(values, block.block_numel, block.dtype)
    of_rows = scales.view(values.shape[0], -1).view(torch.uint8)
    return torch.cat((codes.view(torch.uint8), of_rows), dim=1)


def decode(rows: Tensor, block: BlockFormat) -> Tensor:
    """The inverse of `encode`, but for the rounding: (rows, numel) float32."""
    numel = rows.shape[1] * block.block_numel // (block.block_numel + 4)
    codes = rows[:, :numel].view(block.dtype)
    scales = rows[:, numel:].contiguous().view(torch.float32)
    return ops.dequantise_blocks(codes, scales, block.block_numel)
