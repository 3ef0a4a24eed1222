"""The command line of `pycoll bench`: nccl-tests' letters where they fit, and the plan they mean."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pycoll.bench.cases import DEVICES, DTYPES, OPS, REDUCE_OPS, Case, places
from pycoll.bench.compare import Plan, World
from pycoll.bench.engine import Effort
from pycoll.bench.units import parse_nbytes

ALL = "all"
DESCRIPTION = """\
Times collectives on several backends in turn, checks their results on data whose sums are exact, and prints medians,
bandwidths (nccl-tests' formulas), ratios, and the limit of the hardware, measured in the same run.

  pycoll bench all_reduce -b 8 -e 64M -f 2 -n 2 --backend gloo,mpi,pycoll --json out.json --plot out.png
  pycoll bench all -n 2,4 --sizes 8,64K,16M -d bfloat16
  torchrun --nproc-per-node 2 -m pycoll.cli bench all_reduce
  pycoll bench --compare old.json new.json

Exit code: 0; 1 if a backend gave a wrong result, refused a case, failed, or became slower; 2 for bad arguments."""


class OneLineParser(argparse.ArgumentParser):
    """Errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def names(text: str) -> tuple[str, ...]:
    """ "a, b" to ("a", "b")."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def size(text: str) -> int:
    """ "64K" to 65536."""
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def sizes(text: str) -> tuple[int, ...]:
    """ "8,64K" to (8, 65536)."""
    return tuple(size(part) for part in text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """ "2,4" to (2, 4)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers") from None


def world(text: str) -> tuple[int, tuple[int, ...]]:
    """ "4:8,64K" to (4, (8, 65536))."""
    number, colon, listed = text.partition(":")
    if not colon or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not RANKS:SIZE[,SIZE…], such as 4:8,64K")
    return int(number), sizes(listed)


def steps(begin: int, end: int, factor: float) -> tuple[int, ...]:
    """Sizes from `begin` to `end`, each `factor` times the one before, rounded; always growing.

    Raises:
        ValueError: the range is empty, or the factor does not grow.
    """
    if begin > end:
        raise ValueError(f"-b is {begin} and -e is {end}: the last size lies before the first")
    if not 1 < factor < math.inf:
        raise ValueError(f"-f is {factor:g}, but must be above 1, and finite")
    listed = [begin]
    exact = float(begin)
    while (exact := exact * factor) <= end * (1 + 1e-9):
        if round(exact) > listed[-1]:
            listed.append(round(exact))
    return tuple(listed)


def _add_what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is measured").add_argument
    add("ops", nargs="?", type=names, default=("all_reduce",), help=f"{', '.join(OPS)}, or {ALL}")
    add("-b", "--begin", type=size, default=8, metavar="SIZE", help="smallest S (8)")
    add("-e", "--end", type=size, default=64 << 20, metavar="SIZE", help="largest S (64M)")
    add("-f", "--factor", type=float, default=8.0, help="from one size to the next (8)")
    add("--sizes", type=sizes, metavar="SIZE,…", help="instead of -b, -e, -f")
    add("-d", "--dtype", default="float32", help=", ".join(DTYPES))
    add("-o", "--op", default="sum", help=", ".join(REDUCE_OPS))
    add("-n", "--ranks", type=numbers, default=(2,), metavar="N,…", help="numbers of ranks (2)")
    add("--cases", type=world, action="append", metavar="RANKS:SIZES", help="instead of -n, -b, …")
    add("--place", choices=("in", "out", "both"), default="both", help="in place, out of place")
    add("--async-op", action="store_true", help="async_op=True, waited for at once")
    add("--device", choices=DEVICES, default="cpu")
    add(
        "--backend",
        "--backends",
        type=names,
        default=("gloo", "pycoll"),
        metavar="NAME,…",
        help="the first is the yardstick; gloo, nccl, …; pycoll, pycoll.direct (without "
        "torch.distributed's functions), pycoll.mapped (tensors that all ranks map), "
        "pycoll:ALGORITHM; mpi (mpi4py); floor (a backend that does nothing); symm_mem (torch's "
        "operators, GPU)",
    )


def _add_how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how").add_argument
    add("-w", "--warmup", type=int, default=5, metavar="CALLS", help="before the first timed one")
    add(
        "-c", "--check", type=int, choices=(0, 1), default=1, help="compare results with right ones"
    )
    add("--iters", type=int, metavar="CALLS", help="of a block, instead of --repetition-seconds")
    add("--rounds", type=int, default=5, help="times that each case is measured (5)")
    add("--repetitions", type=int, default=3, help="timed blocks in a round (3)")
    add("--repetition-seconds", type=float, default=0.05, help="length of a block (0.05)")
    add("--fresh-ranks", action="store_true", help="new processes in every round")
    add("--timeout", type=float, default=120.0, help="seconds that one measurement may take")
    add("--no-limit", action="store_true", help="without the limit of the hardware")
    add("--beside-products", action="store_true", help="beside a running matrix product")


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("results").add_argument
    add("--json", type=Path, metavar="FILE", help="everything, with every round")
    add("--csv", type=Path, metavar="FILE", help="a line a case and backend")
    add("--plot", type=Path, metavar="FILE.png", help="latency and bandwidth over size")
    add("--fit", type=Path, metavar="FILE.json", help="cost models of pycoll's algorithms")
    add(
        "--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="two JSON files; runs nothing"
    )
    add("--verify", type=Path, metavar="FILE", help="run a JSON file's cases; fail if ratios fell")
    add("--margin", type=float, help="of --compare (0.1) and --verify (0.5)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the arguments of `pycoll bench`."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_what(parser)
    _add_how(parser)
    _add_results(parser)


def plan_of(arguments: argparse.Namespace, backends: Sequence[str] | None = None) -> Plan:
    """The plan that parsed arguments mean; `backends` in place of theirs, where some were left out.

    Raises:
        ValueError: for what torch, the engine or the formulas cannot do; names the argument.
    """
    ops = OPS if arguments.ops == (ALL,) else arguments.ops
    if not ops:
        raise ValueError(f"no collective is named; give some of {', '.join(OPS)}, or {ALL}")
    if not arguments.timeout > 0:
        raise ValueError(f"--timeout is {arguments.timeout:g} s, but must be above 0")
    nbytes = arguments.sizes or steps(arguments.begin, arguments.end, arguments.factor)
    listed = arguments.cases or [(ranks, nbytes) for ranks in arguments.ranks]
    worlds = [World(ranks, tuple(_cases(arguments, ops, chosen))) for ranks, chosen in listed]
    return Plan(
        backends=tuple(backends or arguments.backend),
        worlds=tuple(worlds),
        rounds=arguments.rounds,
        effort=effort_of(arguments),
        limits=not arguments.no_limit,
        beside_products=arguments.beside_products,
        fresh_ranks=arguments.fresh_ranks,
        timeout=arguments.timeout,
    )


def effort_of(arguments: argparse.Namespace) -> Effort:
    """Raises ValueError for numbers that make no sense."""
    if arguments.iters is not None and arguments.iters < 1:
        raise ValueError(f"--iters is {arguments.iters}, but must be at least 1")
    if arguments.warmup < 0:
        raise ValueError(f"-w is {arguments.warmup}, but must not be negative")
    if arguments.repetitions < 1:
        raise ValueError(f"--repetitions is {arguments.repetitions}, but must be at least 1")
    fixed = (
        {}
        if arguments.iters is None
        else dict.fromkeys(("min_calls", "max_calls"), arguments.iters)
    )
    return Effort(
        warmup_calls=arguments.warmup,
        repetitions=arguments.repetitions,
        repetition_seconds=arguments.repetition_seconds,
        checks=bool(arguments.check),
        **fixed,
    )


def _cases(arguments: argparse.Namespace, ops: Sequence[str], nbytes: Sequence[int]) -> list[Case]:
    cases = []
    for op in ops:
        Case(op, 8, arguments.dtype, reduce_op=arguments.op)  # unknown names are refused first
        wanted = {"in": (True,), "out": (False,), "both": places(op)}[arguments.place]
        # What has no such place is measured in the one it has.
        chosen = [place for place in wanted if place in places(op)] or list(places(op))
        listed = (8,) if op == "barrier" else nbytes
        for in_place, size_ in itertools.product(chosen, listed):
            cases.append(
                Case(
                    op,
                    size_,
                    arguments.dtype,
                    arguments.async_op,
                    in_place,
                    arguments.op,
                    arguments.device,
                )
            )
    return cases
