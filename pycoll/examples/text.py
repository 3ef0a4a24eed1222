"""The text that every machine with Python has: source files of its standard library.

A `Corpus` is the same on every rank and in every run on one machine, and so are its batches: which
windows a step reads depends on (seed, step) alone, and rank r of n reads the r-th of n equal parts.
The ranks' batches, joined in rank order, are therefore the single process's batch.
"""

from __future__ import annotations

import hashlib
import string
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Modules in every supported Python, picked for prose-rich, plain code; read in this (sorted) order.
MODULES = (
    "argparse", "ast", "bdb", "calendar", "codecs", "configparser", "copy", "csv", "dataclasses",
    "datetime", "difflib", "dis", "doctest", "enum", "fractions", "ftplib", "functools", "gettext",
    "heapq", "inspect", "ipaddress", "mailbox", "optparse", "os", "pdb", "pickle", "pydoc",
    "random", "shutil", "smtplib", "socket", "statistics", "subprocess", "tarfile", "textwrap", "threading",
    "traceback", "typing", "unittest/case", "unittest/mock", "uuid", "zipfile",
)  # fmt: skip
# A fixed vocabulary keeps the model's shape independent of the Python version. The last entry
# stands for the rest.
VOCABULARY = "\n" + "".join(chr(code) for code in range(32, 127)) + "\N{REPLACEMENT CHARACTER}"
VALIDATION_SHARE = 0.1
assert set(string.printable) - set(VOCABULARY) == set("\t\r\x0b\x0c")


def standard_library_text() -> str:
    """The chosen modules' sources, joined; a module that this Python lacks is left out."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [root / f"{module}.py" for module in MODULES]
    return "".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())


def encode(text: str) -> Tensor:
    """Characters to indices into `VOCABULARY`: (len(text),) int64; a tab counts as four spaces."""
    unknown = len(VOCABULARY) - 1
    index = {character: position for position, character in enumerate(VOCABULARY)}
    return torch.tensor(
        [index.get(character, unknown) for character in text.expandtabs(4)], dtype=torch.int64
    )


def decode(tokens: Tensor) -> str:
    """Indices (T,) back to a string."""
    return "".join(VOCABULARY[index] for index in tokens.tolist())


@dataclass(frozen=True)
class Corpus:
    """Text as indices: `train` and the held-out `validation`, both one-dimensional int64, and the
    text's SHA-256.
    """

    train: Tensor
    validation: Tensor
    sha256: str

    @classmethod
    def from_text(cls, text: str, context: int) -> Corpus:
        """Splits off the last tenth for validation.

        Raises:
            ValueError: if either part is shorter than one window of `context` + 1 characters.
        """
        tokens = encode(text)
        held_out = int(len(tokens) * VALIDATION_SHARE)
        if held_out <= context:
            needed = int((context + 1) / VALIDATION_SHARE) + 1
            raise ValueError(
                f"not enough text: {len(tokens)} characters, context {context} needs about {needed}"
            )
        split = len(tokens) - held_out
        return cls(tokens[:split], tokens[split:], hashlib.sha256(text.encode()).hexdigest())

    def batch(
        self,
        step: int,
        seed: int,
        batch_size: int,
        context: int,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> Batch:
        """The rank's part of one step's joined batch: b rows from rank * b on, b = batch_size /
        world_size.

        Raises:
            ValueError: if batch_size is not a multiple of world_size.
        """
        if batch_size % world_size:
            raise ValueError(
                f"batch size {batch_size} is not a multiple of world size {world_size}"
            )
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - context, (batch_size,), generator=generator)
        return _windows(self.train, starts.chunk(world_size)[rank], context)

    def validation_batch(
        self, windows: int, context: int, *, rank: int = 0, world_size: int = 1
    ) -> Batch:
        """The rank's share (every world_size-th) of up to `windows` evenly spaced held-out windows;
        may be empty.
        """
        last_start = len(self.validation) - context - 1
        count = min(windows, last_start + 1)
        starts = torch.linspace(0, last_start, count, dtype=torch.float64).long()
        return _windows(self.validation, starts[rank::world_size], context)


@dataclass(frozen=True)
class Batch:
    """`inputs` and `targets`, both (B, context) int64; targets are the inputs' next characters."""

    inputs: Tensor
    targets: Tensor


def _windows(tokens: Tensor, starts: Tensor, context: int) -> Batch:
    rows = tokens[starts[:, None] + torch.arange(context + 1)]
    return Batch(rows[:, :-1], rows[:, 1:])
