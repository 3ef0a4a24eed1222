"""What commands that measure do before they begin: try their files, and see to an orderly end."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pycoll.bench import torchrun


def check_writable(argument: str, path: Path | None) -> None:
    """So that no measurement is lost. Makes the folder; leaves a file as it is, and none where there was none.

    Raises:
        ValueError: the file cannot be written; names argument, path and reason.
    """
    if path is None:
        return
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ValueError(
            f"{argument} is {path}, which cannot be written ({error.strerror}); give another path"
        ) from None


@contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM ends the program as Ctrl-C does: its ranks end, and their folders go. (torchrun's ranks have neither.)"""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or torchrun.world_size_here() is not None:
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
