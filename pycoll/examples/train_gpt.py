"""Trains a small character-level GPT on the standard library's sources, on ranks or in one process.

    torchrun --nproc-per-node 2 -m pycoll.examples.train_gpt --backend pycoll --steps 300
    python -m pycoll.examples.train_gpt --world-size 1 --steps 300

n ranks (pycoll's DistributedDataParallel, or torch's, which other backends need) and one process
(no process group, the joined batch) see the same data from the same weights and should therefore
follow the same losses. They differ by rounding alone: the mean of n means adds the same float32
numbers in another order, which moves the first loss by at most an ulp or two (5e-7 nats). Training
amplifies that, and AdamW, which divides a gradient by its own size, does so most while training is
unstable: without a warm-up and a limit on the gradient's norm, losses came 1e-2 apart within 200
steps. With them the largest difference over 400 steps was 4.4e-6 (four seeds), while ranks that
never average their gradients are off by 7e-3 and more after three steps. LOSS_TOLERANCE lies well
between the two.

Share of communication: after the training has been evaluated, further steps are run in pairs, one
as usual and one under DDP's `no_sync`, in changing order; the share is (median with − median
without) / median with, of the slowest rank. It is the time by which synchronising gradients
lengthens a step: communication hidden behind the backward pass does not count unless it slows that
down.

Exit code: 0, 1 if training failed, 2 for bad arguments, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import pycoll
from pycoll.bench.engine import Alone, TorchPeers
from pycoll.bench.peers import check_backend
from pycoll.bench.steps import ExposedCommunication, Laps, exposed_communication
from pycoll.examples.gpt import GPT, PRESETS, generate, next_character_loss
from pycoll.examples.text import VOCABULARY, Corpus, decode, encode, standard_library_text

WRAPPERS: dict[str, Any] = {
    "pycoll": pycoll.DistributedDataParallel,
    "torch": torch.nn.parallel.DistributedDataParallel,
}
LOSS_TOLERANCE = 1e-4
DEFAULT_BACKEND = "pycoll"
GRADIENT_NORM_LIMIT = 0.5
VALIDATION_WINDOWS = 64
# DDP rebuilds its buckets after the first step, and caches are cold.
STEPS_NOT_TIMED = 3
PROMPT = "def "
GENERATED_CHARACTERS = 240


@dataclass(frozen=True)
class Job:
    """What a run is asked to do; `rank` and `world_size` are this process's place in it.

    Attributes:
        backend: None trains in one process without a process group.
        wrapper: whose DistributedDataParallel, "pycoll" or "torch"; without a backend none.
        batch_size: sequences of the joined batch, of which each rank takes an equal part.
        context: characters a sequence.
        pairs: pairs of steps for the share of communication.
    """

    backend: str | None
    wrapper: str | None
    rank: int
    world_size: int
    model: str
    steps: int
    batch_size: int
    context: int
    learning_rate: float
    warmup_steps: int
    pairs: int
    seed: int


class Trainer:
    """Model, optimizer and data of one rank."""

    def __init__(self, job: Job, corpus: Corpus) -> None:
        self.job, self.corpus = job, corpus
        self.peers = Alone() if job.backend is None else TorchPeers()
        self.model = GPT(PRESETS[job.model], len(VOCABULARY), job.seed)
        self.ddp: Any = None
        if job.wrapper is not None:
            wrap = WRAPPERS[job.wrapper]
            self.ddp = wrap(self.model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=job.learning_rate, betas=(0.9, 0.98)
        )

    def step(self, number: int, synchronise: bool = True) -> float:
        """One training step; returns this rank's loss in nats a character, before the update."""
        batch = self.corpus.batch(
            number,
            self.job.seed,
            self.job.batch_size,
            self.job.context,
            rank=self.job.rank,
            world_size=self.job.world_size,
        )
        self.optimizer.param_groups[0]["lr"] = self._learning_rate(number)
        silent = contextlib.nullcontext() if synchronise or self.ddp is None else self.ddp.no_sync()
        with silent:
            loss = next_character_loss((self.ddp or self.model)(batch.inputs), batch.targets)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_LIMIT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def _learning_rate(self, number: int) -> float:
        """Linear warm-up, then a cosine down to a tenth; steps beyond the last keep its rate."""
        warmup = min(1.0, (number + 1) / self.job.warmup_steps) if self.job.warmup_steps else 1.0
        progress = min(1.0, number / self.job.steps)
        return self.job.learning_rate * warmup * (0.55 + 0.45 * math.cos(math.pi * progress))

    @torch.no_grad()
    def perplexity(self) -> float:
        """Of held-out characters, over all ranks: exp of the mean loss."""
        job = self.job
        batch = self.corpus.validation_batch(
            VALIDATION_WINDOWS, job.context, rank=job.rank, world_size=job.world_size
        )
        total = torch.zeros(2, dtype=torch.float64)
        if len(batch.inputs):
            loss = next_character_loss(self.model(batch.inputs), batch.targets)
            total[0], total[1] = loss.double() * batch.targets.numel(), batch.targets.numel()
        if job.backend is not None:
            dist.all_reduce(total)
        return math.exp(total[0] / total[1])

    def joined_losses(self, mine: Sequence[float]) -> list[float]:
        """The ranks' losses averaged step by step: the joined batch's, as all parts are equal."""
        losses = torch.tensor(mine, dtype=torch.float64)
        if self.job.backend is not None:
            dist.all_reduce(losses)
            losses /= self.job.world_size
        return losses.tolist()

    def communication(self) -> ExposedCommunication | None:
        """See the module's docstring. Ruins the model: ranks go apart in steps without sync."""
        if self.job.backend is None or self.job.pairs == 0:
            return None

        def step(synchronise: bool) -> None:
            self.step(self.job.steps, synchronise)

        step(True)
        return exposed_communication(step, self.peers, self.job.pairs)


def train(job: Job, corpus: Corpus) -> dict[str, Any]:
    """Runs the job and returns its result, the same on every rank but for times and the sample.

    Raises:
        FloatingPointError: on every rank, if a loss is not finite.
    """
    trainer = Trainer(job, corpus)
    perplexity_before = trainer.perplexity()
    laps, losses = Laps(), list[float]()
    laps.start()
    for number in _shown(job, losses, laps):
        losses.append(trainer.step(number))
        laps.lap()
    joined = trainer.joined_losses(losses)
    if not all(map(math.isfinite, joined)):
        first = next(number for number, loss in enumerate(joined) if not math.isfinite(loss))
        raise FloatingPointError(f"the loss of step {first + 1} is {joined[first]}")
    result = {
        "backend": job.backend,
        "wrapper": job.wrapper,
        "world_size": job.world_size,
        "job": asdict(job),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "corpus_sha256": corpus.sha256,
        "losses": joined,
        "perplexity": {"before": perplexity_before, "after": trainer.perplexity()},
        "step_seconds": laps.median(skip=STEPS_NOT_TIMED),
        "tokens_per_second": job.batch_size * job.context / laps.median(skip=STEPS_NOT_TIMED),
        "sample": None,
        "communication": None,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    if job.rank == 0:
        tokens = generate(trainer.model, encode(PROMPT), GENERATED_CHARACTERS, job.seed)
        result["sample"] = decode(tokens)
    communication = trainer.communication()
    if communication is not None:
        result["communication"] = {**asdict(communication), "share": communication.share}
    return result


def _shown(job: Job, losses: Sequence[float], laps: Laps) -> Iterator[int]:
    """The step numbers. Rank 0 shows a progress bar, or a line now and then without a terminal."""
    console = Console(stderr=True)
    if job.rank != 0:
        yield from range(job.steps)
        return
    every = 1 if console.is_terminal else max(1, job.steps // 8)
    name = job.backend or "one process"
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    detail = TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s")
    with Progress(*columns, detail, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=job.steps, loss="–", speed="–")
        for number in range(job.steps):
            yield number
            loss = f"{losses[-1]:.3f}"
            speed = f"{job.batch_size * job.context / laps.seconds[-1]:,.0f}"
            progress.update(task, completed=number + 1, loss=loss, speed=speed)
            if not console.is_terminal and (number + 1) % every == 0:
                line = f"{name}: step {number + 1}/{job.steps}, loss {loss}, {speed} tokens/s"
                print(line, file=sys.stderr, flush=True)


def _run_of(result: dict[str, Any]) -> str:
    if result["backend"] is None:
        return "one process"
    return f"{result['backend']} (DistributedDataParallel of {result['wrapper']})"


def summary(result: dict[str, Any]) -> str:
    """A few lines for people."""
    job, perplexity = result["job"], result["perplexity"]
    communication = result["communication"]
    lines = [
        f"{_run_of(result)}: {job['world_size']} rank(s), "
        f"{result['parameters']:,} parameters, {job['steps']} steps of "
        f"{job['batch_size'] * job['context']} characters",
        f"loss {result['losses'][0]:.4f} to {result['losses'][-1]:.4f}, held-out perplexity "
        f"{perplexity['before']:.1f} to {perplexity['after']:.2f} a character",
        f"{result['tokens_per_second']:,.0f} tokens/s, "
        f"{result['step_seconds'] * 1e3:.1f} ms a step",
    ]
    if communication is not None:
        lines.append(
            f"share of communication {communication['share']:.1%} of a step "
            f"({communication['with_sync'] * 1e3:.1f} ms with gradient sync, "
            f"{communication['without_sync'] * 1e3:.1f} ms without, {communication['pairs']} pairs)"
        )
    if result["sample"] is not None:
        lines += ["sample:", *("  | " + line for line in result["sample"].splitlines())]
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, once: torchrun shows all ranks' stderr."""

    def error(self, message: str) -> NoReturn:
        first = os.environ.get("RANK", "0") == "0"
        self.exit(2, f"{self.prog}: error: {message}\n" if first else None)


def parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train_gpt", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", help=f"for runs under torchrun (default {DEFAULT_BACKEND})")
    add("--wrapper", choices=sorted(WRAPPERS), help="whose DDP (default: pycoll where it can be)")
    add("--world-size", type=int, help="1 without torchrun; under torchrun, checked against it")
    add("--model", choices=sorted(PRESETS), default="small")
    add("--steps", type=int, default=300)
    add("--batch-size", type=int, default=8, help="sequences a step, all ranks together")
    add("--context", type=int, help="characters a sequence (default: the model's positions)")
    add("--learning-rate", type=float, default=1.5e-3)
    add("--warmup-steps", type=int, default=40)
    add("--share-pairs", type=int, default=40, help="pairs of steps that measure communication")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="torch's threads in each process")
    add("--text", type=Path, help="a text file instead of the standard library's sources")
    add("--json", type=Path, help="where rank 0 writes the result")
    return parser


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Job, Corpus]:
    """Checks everything that can be checked before a process group exists.

    Exits with code 2 and one line on stderr for arguments that cannot be run.
    """
    parsing = parser()
    arguments = parsing.parse_args(argv)
    try:
        job = _job(arguments)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
        text = arguments.text.read_text(encoding="utf-8") if arguments.text else None
        corpus = Corpus.from_text(standard_library_text() if text is None else text, job.context)
    except (ValueError, OSError) as error:
        parsing.error(str(error))
    return arguments, job, corpus


def _job(arguments: argparse.Namespace) -> Job:
    """Raises ValueError with the reason if the arguments do not fit each other or the machine."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if launched else 1
    if not 0 < arguments.learning_rate <= 1:
        raise ValueError(
            f"--learning-rate must be above 0 and up to 1, got {arguments.learning_rate}"
        )
    for name in ("steps", "batch_size", "threads"):
        value = getattr(arguments, name)
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}")
    for name in ("warmup_steps", "share_pairs", "seed"):
        value = getattr(arguments, name)
        if not 0 <= value < 1 << 31:
            raise ValueError(f"--{name.replace('_', '-')} must be 0 to 2^31 − 1, got {value}")
    if arguments.world_size is not None and arguments.world_size != world_size:
        wanted = arguments.world_size
        if wanted < 1:
            raise ValueError(f"--world-size must be at least 1, got {wanted}")
        remedy = f"torchrun --nproc-per-node {wanted} -m pycoll.examples.train_gpt"
        raise ValueError(f"--world-size {wanted}, but {world_size} was started; use: {remedy}")
    if launched or arguments.backend is not None:
        check_backend(arguments.backend or DEFAULT_BACKEND)
    positions = PRESETS[arguments.model].positions
    context = positions if arguments.context is None else arguments.context
    if not 1 <= context <= positions:
        raise ValueError(
            f"--context must be 1 to {positions}, the positions of --model {arguments.model}, "
            f"got {context}"
        )
    if arguments.batch_size % world_size:
        raise ValueError(
            f"--batch-size {arguments.batch_size} is not a multiple of world size {world_size}"
        )
    backend = (arguments.backend or DEFAULT_BACKEND) if launched else None
    return Job(
        backend=backend,
        wrapper=_wrapper(arguments.wrapper, backend),
        rank=int(os.environ["RANK"]) if launched else 0,
        world_size=world_size,
        model=arguments.model,
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        context=context,
        learning_rate=arguments.learning_rate,
        warmup_steps=arguments.warmup_steps,
        pairs=arguments.share_pairs,
        seed=arguments.seed,
    )


def _wrapper(asked: str | None, backend: str | None) -> str | None:
    if backend is None:
        if asked is not None:
            raise ValueError(f"--wrapper {asked}, but one process needs none; start with torchrun")
        return None
    if asked == "pycoll" and backend != "pycoll":
        raise ValueError(f"--wrapper pycoll needs --backend pycoll, got {backend}; use torch")
    return asked or ("pycoll" if backend == "pycoll" else "torch")


def main(argv: Sequence[str] | None = None) -> int:
    arguments, job, corpus = parse(argv)
    torch.set_num_threads(arguments.threads)
    if job.backend is not None:
        dist.init_process_group(job.backend)
    try:
        result = train(job, corpus)
    except FloatingPointError as error:
        if job.rank == 0:
            print(f"train_gpt: training failed: {error}", file=sys.stderr)
        return 1
    finally:
        if job.backend is not None:
            dist.destroy_process_group()
    if job.rank == 0:
        print(summary(result), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
