"""Trains the demo's GPT with pycoll's DistributedDataParallel, one process a rank.

    torchrun --nproc-per-node 2 -m pycoll.examples.train_ddp --steps 200
    torchrun --nproc-per-node 2 -m pycoll.examples.train_ddp --zero --wire int8 --timeline trace

What a program that trains in one process adds is marked with (1) to (4).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

import pycoll
from pycoll.examples.gpt import GPT, PRESETS, next_character_loss
from pycoll.examples.text import VOCABULARY, Corpus, standard_library_text
from pycoll.parallel.comm_hooks import Float8State, Int8State, quantised_hook


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train_ddp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=sorted(PRESETS), default="small")
    add("--steps", type=int, default=200)
    add("--batch-size", type=int, default=8, help="sequences a step, all ranks together")
    add("--accumulate", type=int, default=1, help="micro-batches a step")
    add("--learning-rate", type=float, default=1.5e-3)
    add("--wire", choices=("float32", "fp8", "int8"), default="float32", help="of gradients")
    add("--zero", action="store_true", help="divide the optimizer's state among the ranks")
    add(
        "--timeline",
        metavar="PREFIX",
        help="write a Chrome trace of the last passes, a file a rank",
    )
    arguments = parser.parse_args(argv)
    if min(arguments.steps, arguments.batch_size, arguments.accumulate) < 1:
        parser.error("--steps, --batch-size and --accumulate must be positive")
    return arguments


def train(arguments: argparse.Namespace) -> list[float]:
    """This rank's part of the training; returns the mean loss over ranks of each step, in nats a character."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = PRESETS[arguments.model]
    corpus = Corpus.from_text(standard_library_text(), config.positions)
    model = GPT(config, len(VOCABULARY), seed=rank)  # ranks may differ: rank 0's weights are taken
    ddp = pycoll.DistributedDataParallel(model)  # (2) wrap
    if arguments.wire != "float32":
        state = Float8State() if arguments.wire == "fp8" else Int8State()
        ddp.register_comm_hook(state, quantised_hook)
    optimizer: torch.optim.Optimizer
    if arguments.zero:
        optimizer = pycoll.ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, lr=arguments.learning_rate
        )
    else:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=arguments.learning_rate)
    losses = []
    for step in range(arguments.steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in range(arguments.accumulate):
            batch = corpus.batch(
                step * arguments.accumulate + part,
                0,
                arguments.batch_size,
                config.positions,
                rank=rank,  # (3) every rank has its own part of the batch
                world_size=world_size,
            )
            is_last = part == arguments.accumulate - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                loss = next_character_loss(ddp(batch.inputs), batch.targets) / arguments.accumulate
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        optimizer.step()
        pycoll.all_reduce(total, "avg")
        losses.append(total.item())
        if rank == 0 and (step + 1) % max(1, arguments.steps // 10) == 0:
            print(f"step {step + 1}/{arguments.steps}: loss {losses[-1]:.4f}", flush=True)
    ddp.check_in_sync()
    timeline = ddp.timeline()
    if rank == 0:
        print(timeline)
    if arguments.timeline:
        timeline.save_chrome_trace(f"{arguments.timeline}{rank}.json")
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    torch.set_num_threads(1)
    dist.init_process_group("pycoll")  # (1) under torchrun
    try:
        if arguments.batch_size % dist.get_world_size():
            print("train_ddp: error: --batch-size is not a multiple of the ranks", file=sys.stderr)
            return 2
        train(arguments)
    finally:
        dist.destroy_process_group()  # (4)
    return 0


if __name__ == "__main__":
    sys.exit(main())
