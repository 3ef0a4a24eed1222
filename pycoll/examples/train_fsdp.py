"""Trains a GPT whose parameters, gradients and optimizer state are divided among ranks.

    torchrun --nproc-per-node 2 -m pycoll.examples.train_fsdp --steps 100
    torchrun --nproc-per-node 3 -m pycoll.examples.train_fsdp --bf16 --save checkpoint
    torchrun --nproc-per-node 2 -m pycoll.examples.train_fsdp --bf16 --resume checkpoint

What a program that trains in one process adds is marked with (1) to (5). A checkpoint can be resumed on another number
of ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import pycoll
from pycoll.examples.gpt import GPT, PRESETS, next_character_loss
from pycoll.examples.text import VOCABULARY, Corpus, standard_library_text


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train_fsdp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=sorted(PRESETS), default="medium")
    add("--steps", type=int, default=100)
    add("--batch-size", type=int, default=12, help="sequences a step, all ranks together")
    add("--learning-rate", type=float, default=1e-3)
    add("--stage", type=int, choices=(2, 3), default=3, help="of ZeRO")
    add("--bf16", action="store_true", help="compute in bfloat16, reduce in float32")
    add("--save", type=Path, metavar="FOLDER", help="write a checkpoint at the end")
    add("--resume", type=Path, metavar="FOLDER", help="begin with a checkpoint")
    arguments = parser.parse_args(argv)
    if min(arguments.steps, arguments.batch_size) < 1:
        parser.error("--steps and --batch-size must be positive")
    if arguments.resume is not None and not arguments.resume.is_dir():
        parser.error(f"--resume {arguments.resume}: there is no such folder")
    return arguments


def train(arguments: argparse.Namespace) -> list[float]:
    """This rank's part of the training; returns the mean loss over ranks of each step, in nats a character."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = PRESETS[arguments.model]
    corpus = Corpus.from_text(standard_library_text(), config.positions)
    model = GPT(config, len(VOCABULARY), seed=0)
    policy = pycoll.MixedPrecisionPolicy(torch.bfloat16, torch.float32) if arguments.bf16 else None
    how: dict[str, Any] = {"reshard_after_forward": arguments.stage == 3, "mp_policy": policy}
    for block in model.blocks:
        pycoll.fully_shard(block, **how)  # (2) divide: inner modules first, the whole model last
    pycoll.fully_shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)  # (3) of parts
    first = _resume(arguments.resume, model, optimizer) if arguments.resume else 0
    losses = []
    for step in range(first, first + arguments.steps):
        batch = corpus.batch(
            step, 0, arguments.batch_size, config.positions, rank=rank, world_size=world_size
        )
        loss = next_character_loss(model(batch.inputs).float(), batch.targets)
        loss.backward()
        pycoll.clip_grad_norm_(model.parameters(), 0.5)  # (4) over the parts of all ranks
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        pycoll.all_reduce(total, "avg")
        losses.append(total.item())
        if rank == 0 and (step + 1) % max(1, arguments.steps // 10) == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
    if rank == 0:
        print(pycoll.memory_report(model, optimizer))
    if arguments.save is not None:
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states, "step": first + arguments.steps}
        save(state, checkpoint_id=str(arguments.save))
    return losses


def _resume(folder: Path, model: GPT, optimizer: torch.optim.Optimizer) -> int:
    """Loads a checkpoint of any number of ranks; returns the number of the next step."""
    weights, states = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": states, "step": 0}
    load(state, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return int(state["step"])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    torch.set_num_threads(1)
    dist.init_process_group("pycoll")  # (1) under torchrun
    try:
        if arguments.batch_size % dist.get_world_size():
            print("train_fsdp: error: --batch-size is not a multiple of the ranks", file=sys.stderr)
            return 2
        train(arguments)
    finally:
        dist.destroy_process_group()  # (5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
