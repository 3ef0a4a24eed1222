"""The `pycoll` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 when something is wrong with the machine, or a result; 2 for bad arguments."""
    from pycoll.bench.arguments import OneLineParser, add_arguments
    from pycoll.cli import tune
    from pycoll.cli.run import ending_in_order

    parser = OneLineParser(prog="pycoll", description="Collectives for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="versions, cores, limits, algorithms, environment variables")
    doctor = commands.add_parser("doctor", help="try what pycoll needs of this machine")
    doctor.add_argument("-n", "--ranks", type=int, default=2, help="ranks of the trial (2)")
    bench = commands.add_parser("bench", help="time collectives beside other libraries")
    add_arguments(bench)
    tuner = commands.add_parser("tune-collectives", help="choose algorithms for this machine")
    tune.add_arguments(tuner)
    chosen = parser.parse_args(arguments)
    match chosen.command:
        case "info":
            from pycoll.cli.info import print_info

            return print_info()
        case "bench":
            from pycoll.cli.bench import run_bench

            with ending_in_order():
                return run_bench(chosen, bench.error)
        case "tune-collectives":
            with ending_in_order():
                return tune.run_tune(chosen, tuner.error)
    if not 2 <= chosen.ranks <= 64:
        print(f"pycoll doctor: --ranks is {chosen.ranks}, but must be 2 to 64", file=sys.stderr)
        return 2
    from pycoll.cli.doctor import print_diagnosis

    return print_diagnosis(chosen.ranks)
