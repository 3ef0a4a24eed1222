"""The `pycoll` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 when something is wrong with the machine; 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="pycoll", description="Collectives for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="versions, cores, limits, algorithms, environment variables")
    doctor = commands.add_parser("doctor", help="try what pycoll needs of this machine")
    doctor.add_argument("-n", "--ranks", type=int, default=2, help="ranks of the trial (2)")
    chosen = parser.parse_args(arguments)
    if chosen.command == "info":
        from pycoll.cli.info import print_info

        return print_info()
    if not 2 <= chosen.ranks <= 64:
        print(f"pycoll doctor: --ranks is {chosen.ranks}, but must be 2 to 64", file=sys.stderr)
        return 2
    from pycoll.cli.doctor import print_diagnosis

    return print_diagnosis(chosen.ranks)
