"""torchrun without its tracebacks: `python -m pycoll.examples.launch` takes torchrun's arguments.

When a rank fails, or the launcher is told to end, torchrun ends the ranks and then prints where in
torchrun it was. The ranks have said what went wrong by then; here only the exit code is passed on.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> int:
    """Returns 0, the exit code of the rank that failed first (1 if a signal ended it), or 128 +
    the signal that ended this process.
    """
    try:
        torchrun()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} failed with exit code {failure.exitcode}", file=sys.stderr)
        return max(failure.exitcode, 1)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
