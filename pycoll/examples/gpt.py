"""A small decoder-only transformer over characters: pre-norm blocks, learned positions, tied
output.

No dropout and no other randomness after initialisation, so that a batch split over ranks and the
joined batch in one process compute the same function. B = sequences, T = positions, C = model
width, V = vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model. `positions` is the longest context that it can see, in characters."""

    layers: int
    heads: int
    width: int
    positions: int


# "tiny" is for tests; the gradients of "small", 2.5 MB, make two buckets by DDP's defaults.
PRESETS = {
    "tiny": GPTConfig(layers=2, heads=2, width=32, positions=32),
    "small": GPTConfig(layers=3, heads=4, width=128, positions=64),
    "medium": GPTConfig(layers=6, heads=8, width=256, positions=128),
}


class Block(nn.Module):
    """Causal self-attention and a four times wider feed-forward part, each added to the residual
    stream.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.feed_norm = nn.LayerNorm(config.width)
        self.feed_in = nn.Linear(config.width, 4 * config.width)
        self.feed_out = nn.Linear(4 * config.width, config.width)

    def attend(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C); position t sees positions 0..t."""
        batch, time, width = x.shape
        heads = (
            self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.feed_out(F.gelu(self.feed_in(self.feed_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Character-level language model.

    Args:
        config: shape of the model; `width` must be a multiple of `heads`.
        vocabulary_size: V, the number of distinct characters.
        seed: initialises the weights; equal seeds give equal weights on every rank.
    """

    def __init__(self, config: GPTConfig, vocabulary_size: int, seed: int) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ValueError(f"width {config.width} is not a multiple of heads {config.heads}")
        self.config = config
        self.characters = nn.Embedding(vocabulary_size, config.width)
        self.places = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        """GPT-2's choice: normal(0, 0.02); what adds to the residual stream is scaled by 1/sqrt(2 *
        layers).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                continue
            adds_to_residual = name.endswith(("attention_out.weight", "feed_out.weight"))
            std = 0.02 / math.sqrt(2 * self.config.layers) if adds_to_residual else 0.02
            nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) int64 to next-character logits (B, T, V). Raises ValueError if T exceeds the
        positions.
        """
        time = tokens.shape[1]
        if time > self.config.positions:
            raise ValueError(
                f"{time} characters do not fit the model's {self.config.positions} positions"
            )
        x = self.characters(tokens) + self.places.weight[:time]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.characters.weight)


def next_character_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats a character; logits (B, T, V), targets (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(model: GPT, prompt: Tensor, count: int, seed: int, temperature: float = 0.8) -> Tensor:
    """Continues `prompt` (T,) by `count` sampled characters; returns (T + count,). Equal seeds give
    equal text.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(count):
        window = tokens[-model.config.positions :]
        probabilities = F.softmax(model(window[None])[0, -1] / temperature, dim=0)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)])
    return tokens
