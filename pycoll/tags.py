"""Names for calls, so that two equal-looking ones that ranks have swapped are told apart.

Ranks compare collective, op, dtype and number of elements of every call. Where all of these agree
although the ranks mean different tensors, only a name can tell. ``PYCOLL_DEBUG=DETAIL`` names every
call after its place in the program.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_LIBRARIES = (f"{os.sep}torch{os.sep}", f"{os.sep}pycoll{os.sep}")


@contextlib.contextmanager
def tag(name: str) -> Iterator[None]:
    """Collectives that this thread calls inside are named `name`; ranks whose names differ raise.

    Args:
        name: any text; the first 127 bytes are shown in messages. Not empty.

    Raises:
        ValueError: `name` is empty.
    """
    from pycoll.backend import extension

    if not name:
        raise ValueError("the tag is empty; a call without a tag needs no pycoll.tag")
    core = extension()
    before = core.set_tag(name)
    try:
        yield
    finally:
        core.set_tag(before)


def call_site() -> str:
    """``"train.py:33"``: the innermost line of this thread outside torch and pycoll, else the outermost line."""
    frame = sys._getframe()
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _LIBRARIES):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
